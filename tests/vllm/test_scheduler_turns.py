"""The scheduler's side in conversations, with vLLM's own requests and real agents: what is kept of
an answer, and what the next turn loads of it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.held_blocks import HeldBlocks
from kvbus.integrations.vllm.options import ConnectorOptions, Endpoints
from kvbus.integrations.vllm.scheduler_side import SchedulerSide
from kvbus.integrations.vllm.step_results import WorkerPlace
from tests.agents import AgentProcess, Agents, wait_until
from tests.integrations.vllm_sides import BLOCKS, GROUP, NUM_BLOCKS, PROMPT_TOKENS, memory_of

PLACE = WorkerPlace(0, "", 16 * "a")
WINDOW = 16
PROMPT = list(range(100, 100 + PROMPT_TOKENS - 8))
ANSWER = list(range(200, 208))
SAID = [*PROMPT, *ANSWER]
KEPT = len(SAID) - 1
NEW = [300, 301, 302]
TO_DECODE = {"do_remote_prefill": False}
EMPTY = SchedulerOutput.make_empty()
NOWHERE = "/nowhere/attach.sock"


@pytest.fixture
def pool() -> BlockPool:
    """That of the decode side, in which `BLOCKS` are those of a request."""
    made = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=GROUP.block_size)
    made.touch([made.blocks[one] for one in BLOCKS[0]])
    return made


@contextmanager
def side_of(
    agent: AgentProcess, pool: BlockPool, *, window: int | None = None, **options: Any
) -> Iterator[SchedulerSide]:
    """The scheduler's side of an engine with this agent, and none of the other kind."""
    spec = EngineSpec(agent.role, "model", 1, (structs.replace(GROUP, window=window),))
    endpoints = Endpoints(**{"prefill": NOWHERE, "decode": NOWHERE, agent.role: str(agent.attach)})
    settings = {"bidirectional_kv_xfer": True, "decoder_kv_blocks_ttl": 2.0, **options}
    with memory_of(Path(agent.attach), spec):
        side = SchedulerSide(ConnectorOptions(endpoints, **settings), spec, num_blocks=NUM_BLOCKS)
        side.hold_in(HeldBlocks(pool, drains=True))
        side.meet_workers([(PLACE, PLACE)])
        try:
            wait_until(lambda: list(agent.status()["engines"].values()) == [True], "it is up")
            yield side
        finally:
            side.close()


def answered(
    side: SchedulerSide,
    params: dict[str, Any] | None = TO_DECODE,
    *,
    kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY,
    status: RequestStatus = RequestStatus.FINISHED_STOPPED,
) -> tuple[bool, dict[str, Any] | None]:
    """What the connector says at the end of a request that has said `ANSWER`."""
    extra = {"kv_transfer_params": params} if params is not None else None
    sampling = SamplingParams(max_tokens=20, extra_args=extra, output_kind=kind)
    request = Request("r", list(PROMPT), sampling, None)
    side.expect(request)
    side.allocated(request, BLOCKS, 0)
    request.append_output_token_ids(ANSWER)
    request.num_computed_tokens = len(SAID)  # one step was scheduled ahead
    request.status = status
    return side.finished(request, BLOCKS)


def kept(side: SchedulerSide) -> dict[str, Any]:
    """The params of the next prefill request."""
    keeps, params = answered(side)
    assert not keeps
    assert params is not None
    return params


def next_turn(params: dict[str, Any], prompt: list[int]) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request("next", list(prompt), sampling, None)


def matched(side: SchedulerSide, request: Request, num_cached: int = 0) -> int:
    """How many tokens are loaded; then the request is given up, and its ticket with it."""
    side.expect(request)
    num_tokens = side.matched(request, num_cached)
    request.status = RequestStatus.FINISHED_ABORTED
    side.finished(request, [[]])
    return num_tokens


def are_free(side: SchedulerSide, pool: BlockPool) -> bool:
    """Whether the blocks of the answer are only their request's own."""
    side.step(EMPTY)
    return all(pool.blocks[one].ref_cnt == 1 for one in BLOCKS[0])


def test_all_but_the_last_token_is_kept_for_the_next_prefill_request(
    agents: Agents, pool: BlockPool
) -> None:
    with side_of(agents.all[0], pool) as decode:
        params = kept(decode)

        assert params["remote_num_tokens"] == KEPT
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
        assert not are_free(decode, pool)
        assert not decode.needs_steps
        wait_until(lambda: are_free(decode, pool), "its time is over")


@pytest.mark.parametrize(
    "how",
    [
        {"params": None},
        {"params": {}},
        {"kind": RequestOutputKind.DELTA},
        {"status": RequestStatus.FINISHED_ABORTED},
        {"status": RequestStatus.FINISHED_ERROR},
    ],
    ids=str,
)
def test_what_nobody_can_go_on_with_is_not_kept(
    agents: Agents, pool: BlockPool, how: dict[str, Any]
) -> None:
    with side_of(agents.all[0], pool) as decode:
        assert answered(decode, **how) == (False, None)
        assert are_free(decode, pool)


def test_nothing_is_kept_unless_the_options_say_so(agents: Agents, pool: BlockPool) -> None:
    with side_of(agents.all[0], pool, bidirectional_kv_xfer=False) as decode:
        assert answered(decode) == (False, None)


@pytest.mark.parametrize(
    ("num_cached", "threshold", "num_loaded"),
    [(0, 1, KEPT), (16, 1, KEPT - 16), (KEPT, 1, 0), (KEPT - 5, 5, 5), (KEPT - 5, 6, 0)],
)
def test_the_next_turn_loads_what_is_not_cached_and_worth_it(
    agents: Agents, pool: BlockPool, num_cached: int, threshold: int, num_loaded: int
) -> None:
    with (
        side_of(agents.all[0], pool, decoder_kv_blocks_ttl=60.0) as decode,
        side_of(agents.all[1], pool, kv_recompute_threshold=threshold) as prefill,
    ):
        request = next_turn(kept(decode), [*SAID, *NEW])

        assert matched(prefill, request, num_cached) == num_loaded
        wait_until(lambda: are_free(decode, pool), "given up, its blocks come back at once")


@pytest.mark.parametrize("new", [[], NEW[:1], NEW])
def test_with_a_window_a_token_is_left_to_compute(
    agents: Agents, pool: BlockPool, new: list[int]
) -> None:
    with (
        side_of(agents.all[0], pool, decoder_kv_blocks_ttl=60.0, window=WINDOW) as decode,
        side_of(agents.all[1], pool, kv_recompute_threshold=1, window=WINDOW) as prefill,
    ):
        request = next_turn(kept(decode), [*SAID, *new])

        assert matched(prefill, request) == (KEPT if new else 0)
        assert request.num_prompt_tokens == KEPT + len(new)
        wait_until(lambda: are_free(decode, pool), "given up, its blocks come back at once")


@pytest.mark.parametrize("window", [None, WINDOW])
def test_with_another_prompt_the_load_fails(
    agents: Agents, pool: BlockPool, window: int | None
) -> None:
    with (
        side_of(agents.all[0], pool, window=window) as decode,
        side_of(agents.all[1], pool, kv_recompute_threshold=1, window=window) as prefill,
    ):
        request = next_turn(kept(decode), [*SAID[:-2], 7, *NEW])
        prefill.expect(request)

        num_tokens = prefill.matched(request, 0)
        prefill.allocated(request, [[1, 2, 4]], num_tokens)

        assert num_tokens == request.num_prompt_tokens
        wait_until(lambda: prefill.step(EMPTY).failed == ("next",), "it has failed")
        request.status = RequestStatus.FINISHED_ABORTED
        prefill.finished(request, [[]])
        wait_until(lambda: are_free(decode, pool), "its time is over")


def test_a_server_that_may_not_load_computes_the_turn(agents: Agents, pool: BlockPool) -> None:
    with (
        side_of(agents.all[0], pool) as decode,
        side_of(
            agents.all[1], pool, bidirectional_kv_xfer=False, kv_recompute_threshold=1
        ) as prefill,
    ):
        assert matched(prefill, next_turn(kept(decode), [*SAID, *NEW])) == 0
        wait_until(lambda: are_free(decode, pool), "its time is over")
