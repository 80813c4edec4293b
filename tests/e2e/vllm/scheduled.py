"""vLLM's own scheduler and the connector on both sides of it, over memory that tells its tokens.

Loops play the part of the model: what a token's layer would read has to be the KV of the tokens
before it, and what it computes is written. Of blocks only vLLM's tables are believed.
"""

import copy
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
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
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvbus.integrations.vllm import KvbusConnector
from kvbus.spawn import free_port
from tests.e2e.vllm.configured import configure, full, layers, state, window
from tests.support.agents import AgentProcess, Agents, wait_until

VOCABULARY = 100
LONGEST = 160
MAX_MODEL_LEN = 512
WITHIN_S = 60.0
TO_DECODE = {"do_remote_decode": True}
SMALLER, LARGER = 8, 16
STEP_TOKENS = 24
LENGTH = 2 * STEP_TOKENS
NUM_HEADS, HEAD_SIZE = 4, 32
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
    failed: bool = False


class Ran(NamedTuple):
    """Tokens [start, stop) of a request in a step, and its blocks by group."""

    request: Request
    start: int
    stop: int
    tables: Sequence[Sequence[int]]


Step = tuple[SchedulerOutput, Sequence[Ran]]
"""What vLLM has scheduled."""


@dataclass
class Scheduled:
    """One engine; ``memory`` is that of each group: [block, part, slot, head, dim].

    It schedules ``num_ahead`` steps before it hears of the first.

    ``wrong`` is what tokens have read, or later ones may find in the prefix cache, and is not the
    KV of the tokens before. ``figures`` are what its statistics were told.
    """

    scheduler: Scheduler
    worker: KvbusConnector
    memory: Sequence[torch.Tensor]
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    figures: defaultdict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))
    num_ahead: int = 0
    steps: list[Step] = field(default_factory=list)

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

    def ask(self, *asked: Any, **fields: Any) -> Answer:
        """A `request` has come."""
        request = self.request(*asked, **fields)
        self.requests.append(request)
        self.scheduler.add_request(request)
        return self.answers.setdefault(request.request_id, Answer())

    def answer(self, *asked: Any, **fields: Any) -> Answer:
        """`ask`, and step until it has ended."""
        answer = self.ask(*asked, **fields)
        self.until_ended(answer)
        return answer

    def offered(self, *asked: Any, **fields: Any) -> dict[str, Any]:
        """The params of an `answer`, asked again where vLLM did not wait for the agent."""
        params: list[dict[str, Any]] = []

        def is_offered() -> bool:
            found = self.answer(*asked, **fields).params
            params.extend([found] if found is not None else [])
            return bool(params)

        wait_until(is_offered, "an offer", WITHIN_S)
        return params[0]

    def give_up(
        self, status: RequestStatus = RequestStatus.FINISHED_ABORTED, *, name: str = ""
    ) -> None:
        """This request, or the one that came last, ends now."""
        self.scheduler.finish_requests(name or self.requests[-1].request_id, status)

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
        self.steps.append(self.schedule())
        while len(self.steps) > self.num_ahead:
            self.compute(self.steps.pop(0))

    def schedule(self) -> Step:
        """Schedule a step, and note its tokens and blocks: later ones change both."""
        output = self.scheduler.schedule()
        ran = []
        for one, num_tokens in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[one]
            stop = request.num_computed_tokens
            tables = self.scheduler.kv_cache_manager.get_block_ids(one)
            ran.append(Ran(request, stop - num_tokens, stop, copy.deepcopy(tables)))
        return output, ran

    def compute(self, step: Step) -> None:
        """A step that was scheduled, maybe with others after it."""
        self.run(step)
        self.hear(step)

    def run(self, step: Step) -> None:
        """What a GPU does of a step, which may be late."""
        output, ran = step
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        for compute in (self._write, self._read):
            for one in ran:
                compute(one)
        self.worker.wait_for_save()

    def hear(self, step: Step) -> None:
        """vLLM gets the output of a step."""
        output, ran = step
        self.worker.bind_connector_metadata(output.kv_connector_metadata)
        results = self.worker.get_transfer_results(set())
        for one in ran:
            stop = min(one.stop, one.request.num_prompt_tokens)
            self.answers[one.request.request_id].num_computed += max(0, stop - one.start)
        ids = [one.request.request_id for one in ran]
        told = KVConnectorOutput(
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        result = ModelRunnerOutput(
            ids,
            {one: number for number, one in enumerate(ids)},
            [
                what_follows(one.request.all_token_ids, 1)
                if one.stop >= one.request.num_tokens
                else []
                for one in ran
            ],
            kv_connector_output=None if told.is_empty() else told,
        )
        for outputs in self.scheduler.update_from_output(output, result).values():
            told = outputs.scheduler_stats.kv_connector_stats if outputs.scheduler_stats else None
            for name, more in (told or {}).items():
                self.figures[name] += more
            for each in outputs.outputs:
                answer = self.answers[each.request_id]
                answer.tokens += each.new_token_ids
                answer.ended = each.finish_reason is not None
                answer.failed = each.finish_reason is FinishReason.ERROR
                answer.params = each.kv_transfer_params
                if each.prefill_stats is not None:
                    answer.num_found = each.prefill_stats.num_local_cached_tokens
        if not any(ran for _, ran in self.steps):  # they may have blocks to fill
            self._look_into_cache()

    def _look_into_cache(self) -> None:
        """Each block that is found by a hash has to hold what the hash is of."""
        known = {}
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        for request in self.requests:
            size, kv = self.scheduler.hash_block_size, kv_of(request.all_token_ids)
            for number, block_hash in enumerate(request.block_hashes):
                known[block_hash] = kv[number * size : (number + 1) * size]
        for block in self.pool.blocks:
            if (key := block.block_hash) is not None:
                has = _numbers(self.memory[get_group_id(key)])[block.block_id]
                spec, right = groups[get_group_id(key)].kv_cache_spec, known[get_block_hash(key)]
                if not torch.equal(has, right[-1:] if isinstance(spec, MambaSpec) else right):
                    self.wrong.append(f"cached: block {block.block_id}: {has}")

    def _write(self, ran: Ran) -> None:
        kv = kv_of(ran.request.all_token_ids)
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        for group, memory, ids in zip(groups, self.memory, ran.tables, strict=True):
            if isinstance(group.kv_cache_spec, MambaSpec):
                self._advance(ran, memory, ids, group.kv_cache_spec)
                continue
            for at in range(ran.start, ran.stop):
                block, slot = _place(memory, ids, at)
                memory[block, :, slot] = kv[at] if at < len(kv) else 0

    def _advance(self, ran: Ran, memory: torch.Tensor, ids: Sequence[int], spec: MambaSpec) -> None:
        """A step begins with the state of the tokens before it, and leaves its own."""
        kv, size = kv_of(ran.request.all_token_ids), spec.block_size
        start, stop = ran.start, ran.stop
        if start > 0 and _numbers(memory)[ids[(start - 1) // size], 0] != kv[start - 1]:
            self.wrong.append(f"{ran.request.request_id}: the state after {start} tokens")
        memory[ids[(stop - 1) // size]] = kv[stop - 1]

    def _read(self, ran: Ran) -> None:
        if ran.request.is_finished():  # vLLM ignores what it says then
            return
        stop, kv = ran.stop, kv_of(ran.request.all_token_ids)
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        for group, memory, ids in zip(groups, self.memory, ran.tables, strict=True):
            spec = group.kv_cache_spec
            if isinstance(spec, MambaSpec):
                continue
            seen = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else stop
            for at in range(max(0, ran.start - seen + 1), stop):
                block, slot = _place(memory, ids, at)
                if block == 0 or _numbers(memory)[block, slot] != kv[at]:
                    self.wrong.append(f"{ran.request.request_id}: token {at} of {spec}")


def _numbers(memory: torch.Tensor) -> torch.Tensor:
    """[block, slot]: one number stands for all of a token's."""
    return memory[:, 0, :, 0, 0]


def _place(memory: torch.Tensor, ids: Sequence[int], at: int) -> tuple[int, int]:
    """The block and the slot of a token."""
    size = memory.shape[2]
    return ids[at // size], at % size


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


PROMPT = prompt_of(LENGTH)


@contextmanager
def engines_of(folder: Path) -> Iterator[EngineOf]:
    """Begins engines of any block size and window, by one configuration of vLLM."""
    case = configure(folder, layers(full()), num_blocks=64, max_model_len=MAX_MODEL_LEN)
    vllm_config = case.vllm_config
    init_none_hash(sha256)

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
        fits: bool = True,
        state_mode: str | None = None,
        reports: bool = True,
        kv_role: str = "kv_both",
        num_ahead: int = 0,
        **options: Any,
    ) -> Iterator[Scheduled]:
        """Beside one agent, or one of each kind, to offer and to load with, if they ``fit``.

        With room for so many of the longest requests, whose tokens see ``of`` tokens or all. With a
        ``state_mode`` ("none" or "align") they have a state, too. Unless it ``reports``, what the
        worker says is lost, as `MultiConnector` passes on that of its first child alone.
        ``options`` are the connector's.
        """
        specs = [window(of, block_size=size)] if of is not None else []
        specs += [full(block_size=size)] if has_full else []
        specs += [] if state_mode is None else [_state_beside(specs[0], state_mode)]
        groups = [KVCacheGroupSpec([name], spec) for name, spec in layers(*specs).items()]
        num_blocks = 1 + num_requests * len(specs) * (2 + 2 * LONGEST // size)
        caches = KVCacheConfig(num_blocks, [], groups, hash_block_size=size)
        places = {
            for_what: str(agent.attach)
            for for_what, agent in zip(("prefill", "decode"), agents, strict=True)
            if agent is not None
        }
        config = copy.copy(vllm_config)
        config.cache_config = copy.copy(config.cache_config)
        config.cache_config.block_size = size
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.mamba_cache_mode = state_mode or "none"
        config.cache_config.enable_prefix_caching = state_mode != "none"
        config.shutdown_timeout = drains_s
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.async_scheduling = num_ahead > 0
        if step_tokens:
            config.scheduler_config.max_num_scheduled_tokens = step_tokens
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="KvbusConnector",
            kv_connector_module_path="kvbus.integrations.vllm",
            kv_role=kv_role,
            engine_id=f"engine-{uuid.uuid4().hex}",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "endpoint": places if len(places) > 1 else next(iter(places.values())),
                "model_id": "model",
                **options,
            },
        )
        scheduler_size, hash_size = resolve_kv_cache_block_sizes(caches, config)
        scheduler = (AsyncScheduler if num_ahead else Scheduler)(
            vllm_config=config,
            kv_cache_config=caches,
            structured_output_manager=StructuredOutputManager(config),
            block_size=scheduler_size,
            hash_block_size=hash_size,
            log_stats=True,
        )
        worker = KvbusConnector(config, KVConnectorRole.WORKER, caches)
        try:
            memory = _registered(worker, config, caches)
            place = {(0, 0): worker.get_handshake_metadata()} if reports else {}
            scheduler.connector.set_xfer_handshake_metadata_pp_aware(place)
            if fits:
                for link in scheduler.connector._control_links:
                    assert link.wait_open(WITHIN_S)
            yield Scheduled(scheduler, worker, memory, num_ahead=num_ahead)
        finally:
            scheduler.connector.shutdown()
            worker.shutdown()

    with set_current_vllm_config(vllm_config):
        here = f"tcp://127.0.0.1:{free_port()}"
        init_distributed_environment(1, 0, here, local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1)
    try:
        yield begin
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def _state_beside(attention: Any, mode: str) -> MambaSpec:
    """Without a cache of prefixes, one block has the state of the longest request."""
    size = attention.block_size if mode == "align" else MAX_MODEL_LEN
    return state(attention.page_size_bytes, mode=mode, block_size=size)


def _registered(worker: KvbusConnector, config: Any, caches: KVCacheConfig) -> list[torch.Tensor]:
    """The memory of each group, full of random bits, as the agents have it from now on."""
    made, modules = {}, {}
    for group in caches.kv_cache_groups:
        (name,), spec = group.layer_names, group.kv_cache_spec
        has_state = isinstance(spec, MambaSpec)
        shape = (caches.num_blocks, 2, spec.block_size, NUM_HEADS, HEAD_SIZE)
        if has_state:
            shape = (caches.num_blocks, 1, 1, *spec.shapes[0])
        made[name] = torch.randint(1 << 30, shape, dtype=torch.int32)
        cache = made[name].view(torch.float32)
        modules[name] = SimpleNamespace(kv_cache=[cache[:, 0, 0]]) if has_state else _Layer(cache)
    config.compilation_config.static_forward_context = modules
    worker.register_kv_caches({name: one.view(torch.float32) for name, one in made.items()})
    return list(made.values())


class _Layer(SimpleNamespace):
    """A layer of attention, as far as it writes."""

    def __init__(self, cache: torch.Tensor) -> None:
        super().__init__(impl=self, kv_cache=cache)

    def do_kv_cache_update(
        self, _: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any
    ) -> None:
        for part, rows in enumerate((key, value)):
            cache[slots // cache.shape[2], part, slots % cache.shape[2]] = rows


@dataclass
class Pair:
    """A prefill and a decode engine of unlike block sizes, and their agents."""

    agents: Agents
    prefill: Scheduled
    decode: Scheduled

    def params(self, prompt: list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
        """What a router gets with the prefill's answer."""
        return self.prefill.offered(prompt, 1, TO_DECODE, **fields)

    def awaiting(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The params for decode and for prefill of a request that both get at once."""
        name = uuid.uuid4().hex
        rendezvous = {"transfer_id": name, "endpoint": self.agents.all[0].peer}
        return {"do_remote_prefill": True, "rendezvous": rendezvous}, {
            **TO_DECODE,
            "transfer_id": name,
        }

    def until_ended(self, *answers: Answer) -> None:
        """Step both until these have ended."""
        while not all(answer.ended for answer in answers):
            self.prefill.step()
            self.decode.step()

    @property
    def num_offers(self) -> int:
        """Those that the prefill agent has, reservations included."""
        return int(self.agents.all[0].status()["counts"]["offers"])

    def wait_no_offer(self) -> None:
        """Return once the prefill agent has none, and no reservation."""
        wait_until(lambda: not self.num_offers, "all offers are over", WITHIN_S)


@contextmanager
def pair_of(agents: Agents, engine_of: EngineOf, **options: Any) -> Iterator[Pair]:
    """Engines that have read nothing wrong, and hold nothing at last."""
    ours = {"num_requests": options.pop("num_to_decode", 8)}
    theirs = {"step_tokens": STEP_TOKENS, **options}
    both = ("fetch_timeout_s", "num_ahead", "of")
    ours |= {key: options[key] for key in both if key in options}
    with (
        engine_of((agents.all[0], None), SMALLER, **theirs) as prefill,
        engine_of((None, agents.all[1]), LARGER, **ours) as decode,
    ):
        yield Pair(agents, prefill, decode)
        assert prefill.wrong == decode.wrong == []
        for engine in (prefill, decode):
            engine.until_all_free()
