"""vLLM's own scheduler with the connector in it, over memory that says of which tokens its KV is.

Loops play the part of the model: what a token's layer would read has to be the KV of the tokens
before it, and what it computes is written. Of blocks only vLLM's tables are believed.
"""

import copy
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvbus.engine import KvCache
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm import KvbusConnector
from kvbus.integrations.vllm.description import describe_engine
from kvbus.integrations.vllm.step_results import WorkerPlace, WorkerPlaces
from tests.agents import AgentProcess, wait_until
from tests.integrations.vllm_sides import memory_of
from tests.strict_sessions import bits
from tests.vllm.configured import Configured, configure, full, layers, window

VOCABULARY = 100
LONGEST = 160
WITHIN_S = 60.0
EngineOf = Callable[..., AbstractContextManager["Scheduled"]]


@dataclass
class Answer:
    """What a request has said so far, and its params.

    ``num_computed`` are the tokens of its prompt that this engine has computed itself,
    ``num_found`` those that it found in its prefix cache.
    """

    tokens: list[int] = field(default_factory=list)
    params: dict[str, Any] | None = None
    num_found: int = 0
    num_computed: int = 0
    ended: bool = False


@dataclass
class Scheduled:
    """One engine.

    ``wrong`` is what tokens have read, or later ones may find in the prefix cache, and is not the
    KV of the tokens before.
    """

    spec: EngineSpec
    scheduler: Scheduler
    worker: KvbusConnector
    cache: KvCache
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def pool(self) -> BlockPool:
        """vLLM's blocks."""
        pool: BlockPool = self.scheduler.kv_cache_manager.block_pool
        return pool

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds; those only cached are free."""
        num_free: int = self.pool.get_num_free_blocks()
        return num_free

    def request(
        self,
        prompt: Sequence[int] | None,
        num_tokens: int = 2,
        params: Mapping[str, Any] | None = None,
        *,
        name: str = "",
        sampling: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Request:
        """As vLLM's scheduler gets one; ``sampling`` are params of that, ``fields`` the others."""
        extra = {"kv_transfer_params": dict(params)} if params is not None else None
        asked = {"max_tokens": num_tokens, "ignore_eos": True, "extra_args": extra}
        return Request(
            name or uuid.uuid4().hex,
            list(prompt) if prompt is not None else None,
            SamplingParams(**asked, **(sampling or {})),
            None,
            block_hasher=get_request_block_hasher(self.scheduler.hash_block_size, sha256),
            **fields,
        )

    def add(self, request: Request) -> Answer:
        """A request has come."""
        self.requests.append(request)
        self.scheduler.add_request(request)
        return self.answers.setdefault(request.request_id, Answer())

    def ask(
        self,
        prompt: Sequence[int] | None,
        num_tokens: int = 2,
        params: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Answer:
        """`add` a request."""
        return self.add(self.request(prompt, num_tokens, params, **fields))

    def answer(self, *asked: Any, **fields: Any) -> Answer:
        """`ask`, and step until it has ended."""
        answer = self.ask(*asked, **fields)
        self.until_ended(answer)
        return answer

    def offered(self, *asked: Any, **fields: Any) -> dict[str, Any]:
        """The params of an `answer`, asked again where the agent was too late for the first.

        vLLM waits a second for it.
        """
        params: list[dict[str, Any]] = []

        def is_offered() -> bool:
            found = self.answer(*asked, **fields).params
            params.extend([found] if found is not None else [])
            return bool(params)

        wait_until(is_offered, "an offer", WITHIN_S)
        return params[0]

    def give_up(self, status: RequestStatus = RequestStatus.FINISHED_ABORTED) -> None:
        """The request that came last ends now."""
        self.scheduler.finish_requests(self.requests[-1].request_id, status)

    def until_ended(self, *answers: Answer) -> None:
        """Step until these have ended."""
        self.until(lambda: all(answer.ended for answer in answers))

    def until(self, condition: Callable[[], Any]) -> None:
        """Step until ``condition`` holds."""

        def stepped() -> Any:
            self.step()
            return condition()

        wait_until(stepped, "the scheduler is so far", WITHIN_S)

    def until_all_free(self) -> None:
        """Step until no block is held any more."""
        self.until(lambda: self.num_free == self.pool.num_gpu_blocks - 1)

    def step(self) -> None:
        """One step of vLLM: schedule, compute, hear of it."""
        output = self.scheduler.schedule()
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        results = self.worker.get_transfer_results(set())
        ids = list(output.num_scheduled_tokens)
        ran = [self.scheduler.requests[one] for one in ids]
        for compute in (self._write, self._read):
            for request in ran:
                compute(request, output.num_scheduled_tokens[request.request_id])
        heard = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        for request in ran:
            stop = min(request.num_computed_tokens, request.num_prompt_tokens)
            start = request.num_computed_tokens - output.num_scheduled_tokens[request.request_id]
            self.answers[request.request_id].num_computed += max(0, stop - start)
        result = ModelRunnerOutput(
            ids,
            {one: number for number, one in enumerate(ids)},
            [[self._next(r)] if r.num_computed_tokens >= r.num_tokens else [] for r in ran],
            kv_connector_output=heard,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            for each in outputs.outputs:
                answer = self.answers[each.request_id]
                answer.tokens += each.new_token_ids
                answer.ended = each.finish_reason is not None
                answer.params = each.kv_transfer_params
                if each.prefill_stats is not None:
                    answer.num_found = each.prefill_stats.num_local_cached_tokens
        self._look_into_cache()

    def _look_into_cache(self) -> None:
        """Each block that is found by a hash has to hold what the hash is of."""
        known = {}
        for request in self.requests:
            size, kv = self.scheduler.hash_block_size, kv_of(request.all_token_ids)
            for number, block_hash in enumerate(request.block_hashes):
                known[block_hash] = kv[number * size : (number + 1) * size]
        for block in self.pool.blocks:
            if (key := block.block_hash) is not None:
                has = self._kv(get_group_id(key))[block.block_id]
                if not torch.equal(has, known[get_block_hash(key)]):
                    self.wrong.append(f"cached: block {block.block_id}: {has}")

    def _write(self, request: Request, num_tokens: int) -> None:
        stop = request.num_computed_tokens
        kv = kv_of(request.all_token_ids)
        for group, ids in self._tables(request):
            for layer in self.spec.groups[group].layers:
                for part in ("k", "v"):
                    view = bits(self.cache.view(layer, part))
                    for at in range(stop - num_tokens, stop):
                        block, slot = self._place(group, ids, at)
                        view[block, slot] = kv[at]

    def _read(self, request: Request, num_tokens: int) -> None:
        stop, kv = request.num_computed_tokens, kv_of(request.all_token_ids)
        for group, ids in self._tables(request):
            seen, has = self._window(group), self._kv(group)
            first = 0 if seen is None else max(0, stop - num_tokens - seen + 1)
            for at in range(first, stop):
                block, slot = self._place(group, ids, at)
                if block == 0 or has[block, slot] != kv[at]:
                    self.wrong.append(f"{request.request_id}: token {at} of group {group}")

    def _tables(self, request: Request) -> Iterator[tuple[int, list[int]]]:
        yield from enumerate(self.scheduler.kv_cache_manager.get_block_ids(request.request_id))

    def _place(self, group: int, ids: Sequence[int], at: int) -> tuple[int, int]:
        size = self.spec.groups[group].block_size
        return ids[at // size], at % size

    def _kv(self, group: int) -> torch.Tensor:
        """[block, slot]: one number stands for all of a token's."""
        return bits(self.cache.view(self.spec.groups[group].layers[0], "k"))[:, :, 0, 0]

    def _window(self, group: int) -> int | None:
        """How many tokens a token reads, itself one of them."""
        spec = self.scheduler.kv_cache_config.kv_cache_groups[group].kv_cache_spec
        return spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None

    def _next(self, request: Request) -> int:
        return what_follows(request.all_token_ids, 1)[0]


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    """Prompts of two seeds have no block in common."""
    return [3 + (seed * 31 + at * 7) % 91 for at in range(num_tokens)]


def what_follows(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What such a model says."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(kv_of(tokens)[-1]) % VOCABULARY)
    return tokens[len(prompt) :]


def kv_of(tokens: Sequence[int]) -> torch.Tensor:
    """A number for each token, of it and all before it, as KV is."""
    numbers, number = [], 0
    for token in tokens:
        number = zlib.crc32(token.to_bytes(4, "little"), number)
        numbers.append(number >> 1)
    return torch.tensor(numbers, dtype=torch.int32)


def engines_of(folder: Path) -> EngineOf:
    """Begins engines of any block size and window, by one configuration of vLLM."""
    case = configure(folder, layers(full()), num_blocks=64, max_model_len=512)

    @contextmanager
    def begin(
        agents: Sequence[AgentProcess | None],
        size: int,
        *,
        of: int | None = None,
        num_requests: int = 8,
        has_full: bool = True,
        step_tokens: int = 0,
        drains_s: int = 0,
        **options: Any,
    ) -> Iterator[Scheduled]:
        """With room for so many of the longest requests, whose tokens see ``of`` tokens or all."""
        specs = [window(of, block_size=size)] if of is not None else []
        specs += [full(block_size=size)] if has_full else []
        groups = [KVCacheGroupSpec([name], spec) for name, spec in layers(*specs).items()]
        num_blocks = 1 + num_requests * len(specs) * (2 + 2 * LONGEST // size)
        config = copy.copy(case.vllm_config)
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.block_size = size
        config.shutdown_timeout = drains_s
        if step_tokens:
            config.scheduler_config = copy.copy(config.scheduler_config)
            config.scheduler_config.max_num_scheduled_tokens = step_tokens
        caches = KVCacheConfig(num_blocks, [], groups, hash_block_size=size)
        with scheduled(Configured(config, caches, []), *agents, **options) as engine:
            yield engine

    return begin


@contextmanager
def scheduled(
    case: Configured, offering: AgentProcess | None, loading: AgentProcess | None, **options: Any
) -> Iterator[Scheduled]:
    """An engine beside one agent, or one of each kind."""
    agents = [agent for agent in (offering, loading) if agent is not None]
    name = f"engine-{uuid.uuid4().hex}"
    endpoint: Any = str(agents[0].attach)
    if offering is not None and loading is not None:
        endpoint = {agent.role: str(agent.attach) for agent in agents}
    config, vllm_config = case.scheduler, case.vllm_config
    vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="KvbusConnector",
        kv_connector_module_path="kvbus.integrations.vllm",
        kv_role="kv_both",
        engine_id=name,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"endpoint": endpoint, "model_id": "model", **options},
    )
    vllm_config.cache_config.num_gpu_blocks = config.num_blocks
    spec = describe_engine(vllm_config, config, engine_id=name, model="model")
    scheduler_size, hash_size = resolve_kv_cache_block_sizes(config, vllm_config)
    init_none_hash(sha256)
    paths = [Path(agent.attach) for agent in agents]
    with memory_of(paths[0], spec, config.num_blocks, also_at=paths[1:]) as memory:
        scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=scheduler_size,
            hash_block_size=hash_size,
        )
        connector = scheduler.connector
        try:
            places = tuple(WorkerPlace(0, "", 16 * "a") for _ in agents)
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): WorkerPlaces(places)})
            assert connector._scheduler.wait_up(WITHIN_S)
            worker = KvbusConnector(vllm_config, KVConnectorRole.WORKER, config)
            yield Scheduled(spec, scheduler, worker, memory.cache)
        finally:
            connector.shutdown()
