"""vLLM's own scheduler with the connector in it, over memory that says of which tokens its KV is.

Loops play the part of the model: what a token's layer would read has to be the KV of the tokens
before it, and what it computes is written. Refuses to know of blocks but what vLLM's tables say.
"""

import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvbus.bus import new_secret
from kvbus.engine import KvCache
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.description import describe_engine
from kvbus.integrations.vllm.sessions import memory_link
from kvbus.integrations.vllm.step_results import StepDone, WorkerPlace, WorkerPlaces
from tests.agents import AgentProcess, wait_until
from tests.engines import bits
from tests.integrations.vllm_sides import memory_of
from tests.vllm.configured import Configured

VOCABULARY = 100
WITHIN_S = 60.0


@dataclass
class Answer:
    """What a request has said so far, how many tokens it found in the cache, and its params."""

    tokens: list[int] = field(default_factory=list)
    params: dict[str, Any] | None = None
    num_found: int = 0
    ended: bool = False


@dataclass
class Scheduled:
    """One engine.

    ``wrong`` is what tokens have read, or later ones may find in the prefix cache, and is not the
    KV of the tokens before.
    """

    spec: EngineSpec
    scheduler: Scheduler
    cache: KvCache
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def request(
        self,
        name: str,
        prompt: Sequence[int],
        num_tokens: int,
        params: Mapping[str, Any] | None = None,
    ) -> Request:
        """As vLLM's scheduler gets one."""
        extra = {"kv_transfer_params": dict(params)} if params is not None else None
        sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, extra_args=extra)
        hasher = get_request_block_hasher(self.scheduler.hash_block_size, sha256)
        return Request(name, list(prompt), sampling, None, block_hasher=hasher)

    def add(self, request: Request) -> Answer:
        """A request has come."""
        self.requests.append(request)
        self.scheduler.add_request(request)
        return self.answers.setdefault(request.request_id, Answer())

    def until_ended(self, *answers: Answer) -> None:
        """Step until these have ended."""
        self.until(lambda: all(answer.ended for answer in answers))

    def until(self, condition: Callable[[], bool]) -> None:
        """Step until ``condition`` holds."""

        def stepped() -> bool:
            self.step()
            return condition()

        wait_until(stepped, "the scheduler is so far", WITHIN_S)

    def step(self) -> None:
        """One step of vLLM: schedule, compute, hear of it."""
        output = self.scheduler.schedule()
        results = output.kv_connector_metadata
        ids = list(output.num_scheduled_tokens)
        ran = [self.scheduler.requests[one] for one in ids]
        for compute in (self._write, self._read):
            for request in ran:
                compute(request, output.num_scheduled_tokens[request.request_id])
        heard = KVConnectorOutput(
            finished_recving=set(results.received),
            failed_recving=set(results.failed),
            kv_connector_worker_meta=StepDone(results.step) if results.step else None,
        )
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
        found = self.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache
        for key, held in found.items():
            for block in held.values() if isinstance(held, dict) else (held,):
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
            window, has = self._window(group), self._kv(group)
            first = 0 if window is None else max(0, stop - num_tokens - window + 1)
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
    case.vllm_config.kv_transfer_config = KVTransferConfig(
        kv_connector="KvbusConnector",
        kv_connector_module_path="kvbus.integrations.vllm",
        kv_role="kv_both",
        engine_id=name,
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"endpoint": endpoint, "model_id": "model", **options},
    )
    config = case.scheduler
    case.vllm_config.cache_config.num_gpu_blocks = config.num_blocks
    spec = describe_engine(case.vllm_config, config, engine_id=name, model="model")
    scheduler_size, hash_size = resolve_kv_cache_block_sizes(config, case.vllm_config)
    init_none_hash(sha256)
    with memory_of(Path(agents[0].attach), spec, config.num_blocks) as memory:
        rank, storages = (
            memory.cache.rank,
            {memory.cache.rank.segments[0].segment_id: memory.storage},
        )
        others = [
            memory_link(Path(agent.attach), spec, rank, storages, access=new_secret())
            for agent in agents[1:]
        ]
        scheduler = Scheduler(
            vllm_config=case.vllm_config,
            kv_cache_config=config,
            structured_output_manager=StructuredOutputManager(case.vllm_config),
            block_size=scheduler_size,
            hash_block_size=hash_size,
        )
        connector = scheduler.connector
        try:
            places = tuple(WorkerPlace(0, "", 16 * "a") for _ in agents)
            connector.set_xfer_handshake_metadata_pp_aware({(0, 0): WorkerPlaces(places)})
            wait_until(lambda: connector._scheduler.wait_up(0), "it is up", WITHIN_S)
            yield Scheduled(spec, scheduler, memory.cache)
        finally:
            connector.shutdown()
            for link in others:
                link.close()
