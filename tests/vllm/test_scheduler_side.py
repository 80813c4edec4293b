"""The scheduler's side with vLLM's own requests and real agents, but no engine around it."""

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec import structs

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm import held_blocks, prompts
from kvbus.integrations.vllm.held_blocks import HeldBlocks
from kvbus.integrations.vllm.options import ConnectorOptions
from kvbus.integrations.vllm.scheduler_side import SchedulerSide, urgency_of
from kvbus.integrations.vllm.sessions import ranks_elsewhere
from kvbus.integrations.vllm.stats import OFFERS_FAILED
from kvbus.integrations.vllm.step_results import WorkerPlace
from kvbus.integrations.vllm.transfer_params import prompt_digest
from kvbus.protocol import AgentRanks
from tests.agents import AgentProcess, Agents, wait_until
from tests.integrations.vllm_sides import BLOCKS, GROUP, NUM_BLOCKS, PROMPT_TOKENS, memory_of

ACCESS = 16 * "a"
PROMPT = list(range(100, 100 + PROMPT_TOKENS))
WITHIN_S = 30.0
EMPTY = SchedulerOutput.make_empty()


def pool_of_requests() -> BlockPool:
    """vLLM's own, in which `BLOCKS` are those of a request."""
    pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=GROUP.block_size)
    pool.touch([pool.blocks[one] for one in BLOCKS[0]])
    return pool


@contextmanager
def scheduler_side(
    agent: AgentProcess, pool: BlockPool | None = None, **group: Any
) -> Iterator[SchedulerSide]:
    """The scheduler's side of an engine that the agent knows; ``group`` replaces its fields."""
    spec = EngineSpec(agent.role, "model", 1, (structs.replace(GROUP, **group),))
    with memory_of(agent.attach, spec):
        side = SchedulerSide(ConnectorOptions(str(agent.attach)), spec)
        side.hold_in(HeldBlocks(pool or pool_of_requests(), drains=False))
        side.meet_workers([(WorkerPlace(0, agent.peer, ACCESS),)])
        try:
            assert side.wait_up(WITHIN_S)
            yield side
        finally:
            side.close()


def request_of(
    params: dict[str, Any],
    prompt: list[int] | None = PROMPT,
    *,
    request_id: str = "r",
    **fields: Any,
) -> Request:
    """A request as vLLM's scheduler has it."""
    sampling = SamplingParams(max_tokens=5, extra_args={"kv_transfer_params": params})
    return Request(request_id, list(prompt) if prompt else None, sampling, None, **fields)


def finish(
    agent: AgentProcess, side: SchedulerSide, request: Request, status: RequestStatus
) -> Any:
    """Have a request computed and ended; what the connector says to that."""
    side.expect(request)
    side.allocated(request, BLOCKS, 0)
    wait_until(lambda: agent.status()["counts"]["offers"], "its ticket is made")
    request.num_computed_tokens = request.num_prompt_tokens
    request.status = status
    return side.finished(request, BLOCKS)


def prefilled(agent: AgentProcess, side: SchedulerSide, **fields: Any) -> dict[str, Any]:
    """The params of a decode request for what was offered."""
    request = request_of({"do_remote_decode": True}, **fields)
    keeps, params = finish(agent, side, request, RequestStatus.FINISHED_LENGTH_CAPPED)
    assert not keeps
    assert params
    result: dict[str, Any] = params
    return result


def loaded(side: SchedulerSide, request: Request) -> bool:
    """Load all of a request, to its end; whether it succeeded."""
    side.expect(request)
    num_tokens = side.matched(request, 0)
    assert num_tokens == PROMPT_TOKENS
    side.allocated(request, [[1, 2, 4]], num_tokens)
    failed: list[str] = []
    over: list[str] = []

    def is_over() -> list[str]:
        results = side.step(EMPTY)
        failed.extend(results.failed)
        over.extend(results.received)
        return over

    wait_until(is_over, "the load is over")
    assert over == ["r"]
    return not failed


def with_image(identifier: str, offset: int = 0) -> dict[str, Any]:
    position = PlaceholderRange(offset=offset, length=4)
    feature = MultiModalFeatureSpec(None, "image", identifier, position)
    return {"mm_features": [feature]}


SAME: dict[str, Callable[[], dict[str, Any]]] = {
    "text": dict,
    "lora": lambda: {"lora_request": LoRARequest("one", 1, "/one")},
    "image": lambda: with_image("one"),
}
OTHER: dict[str, Callable[[], dict[str, Any]]] = {
    "other text": lambda: {"prompt": PROMPT[::-1]},
    "one token other": lambda: {"prompt": [*PROMPT[:-1], 7]},
    "a lora": SAME["lora"],
    "an image": SAME["image"],
    "embeddings": lambda: {"prompt": None, "prompt_embeds": torch.zeros(PROMPT_TOKENS, 8)},
}


@pytest.mark.parametrize("kind", SAME)
def test_the_same_request_is_loaded(agents: Agents, kind: str) -> None:
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill, **SAME[kind]())

        assert loaded(decode, request_of(params, **SAME[kind]()))


def computed(side: SchedulerSide, request: Request, num_tokens: int) -> None:
    """One step computes the request up to ``num_tokens``."""
    before, output = request.num_computed_tokens, replace(EMPTY)
    output.num_scheduled_tokens = {request.request_id: num_tokens - before}
    if before == 0:
        output.scheduled_new_reqs = [NewRequestData.from_request(request, tuple(BLOCKS))]
    else:
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=[request.request_id],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[None],
            num_computed_tokens=[before],
            num_output_tokens=[request.num_output_tokens],
        )
    side.done(side.step(output).step)
    request.num_computed_tokens = num_tokens


def readable(agent: AgentProcess, request_id: str) -> int:
    """How many tokens of the request's only offer may be read."""
    (offer,) = (one for one in agent.trace(request_id=request_id) if one["name"] == "offer")
    num_tokens: int = offer["attributes"]["num_tokens"]
    return num_tokens


def test_a_named_request_that_answers_more_than_a_token_is_offered_with_its_prompt(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        params = {"do_remote_decode": True, "transfer_id": uuid.uuid4().hex}
        request = request_of(params, request_id="answers")
        prefill.expect(request)
        prefill.allocated(request, BLOCKS, 0)
        wait_until(lambda: agents.all[0].status()["counts"]["offers"], "its ticket is made")
        for num_tokens in (30, PROMPT_TOKENS, PROMPT_TOKENS + 1, PROMPT_TOKENS + 2):
            computed(prefill, request, num_tokens)
            wait_until(
                lambda n=num_tokens: readable(agents.all[0], "answers") >= min(n, PROMPT_TOKENS),
                "it has grown",
            )
        request.append_output_token_ids([7, 8, 9])
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        _, params = prefill.finished(request, BLOCKS)
        assert params is not None
        assert params["remote_num_tokens"] == PROMPT_TOKENS

        assert loaded(decode, request_of(params))
        assert "not offered" not in caplog.text


def test_the_tokens_of_a_request_are_hashed_once_on_each_side(
    agents: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, hashed = uuid.uuid4().hex, []

    def counted(token_ids: Sequence[int], conditions: Iterable[str]) -> str:
        hashed.append(len(token_ids))
        return prompt_digest(token_ids, conditions)

    monkeypatch.setattr(prompts, "prompt_digest", counted)
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        request = request_of({"do_remote_decode": True, "transfer_id": name})
        _, params = finish(agents.all[0], prefill, request, RequestStatus.FINISHED_LENGTH_CAPPED)
        assert hashed == [PROMPT_TOKENS]
        decode.expect(request_of(params, request_id="by ticket"))
        assert hashed == 2 * [PROMPT_TOKENS]
        meets = {"transfer_id": name, "endpoint": agents.all[0].peer}
        assert loaded(decode, request_of({"do_remote_prefill": True, "rendezvous": meets}))

        assert hashed == 3 * [PROMPT_TOKENS]


def test_of_the_sequences_of_a_named_prompt_the_first_is_offered_and_the_others_are_silent(
    agents: Agents, caplog: pytest.LogCaptureFixture
) -> None:
    name = uuid.uuid4().hex
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        sequences = [
            request_of({"do_remote_decode": True, "transfer_id": name}, request_id=f"{number}_r")
            for number in range(3)
        ]
        ended = [
            finish(agents.all[0], prefill, each, RequestStatus.FINISHED_LENGTH_CAPPED)
            for each in sequences
        ]
        meets = {"transfer_id": name, "endpoint": agents.all[0].peer}

        assert [params is not None for _, params in ended] == [True, False, False]
        assert loaded(decode, request_of({"do_remote_prefill": True, "rendezvous": meets}))
        assert not [one.getMessage() for one in caplog.records if one.levelname == "ERROR"]
        assert (prefill.take_figures() or {}).get(OFFERS_FAILED) in (None, [])


def test_blocks_are_held_until_they_are_read_and_their_request_is_over(agents: Agents) -> None:
    pool = pool_of_requests()
    blocks = [pool.blocks[one] for one in BLOCKS[0]]
    with scheduler_side(agents.all[0], pool) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill)
        pool.free_blocks(reversed(blocks))  # as vLLM does when a request is over
        num_taken = len(pool.get_new_blocks(pool.get_num_free_blocks()))

        assert num_taken == NUM_BLOCKS - 1 - len(blocks)
        assert loaded(decode, request_of(params))

        def come_back() -> bool:
            prefill.step(EMPTY)
            return pool.get_num_free_blocks() == len(blocks)

        wait_until(come_back, "the blocks are free")


def test_blocks_that_were_read_are_there_for_the_next_request_though_no_step_was(
    agents: Agents,
) -> None:
    pool = pool_of_requests()
    with scheduler_side(agents.all[0], pool) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill)
        pool.free_blocks(pool.blocks[one] for one in reversed(BLOCKS[0]))
        assert loaded(decode, request_of(params))
        wait_until(agents.all[0].idle, "the offer is over")

        def come_back() -> bool:
            prefill.expect(request_of({}))
            return pool.get_num_free_blocks() == NUM_BLOCKS - 1

        wait_until(come_back, "the blocks are free")


def test_blocks_are_free_when_both_vllm_and_their_readers_have_done_with_them(
    agents: Agents,
) -> None:
    """vLLM frees late what a step that was begun may still write to."""
    pool = pool_of_requests()
    with scheduler_side(agents.all[0], pool) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill)
        assert loaded(decode, request_of(params))
        wait_until(agents.all[0].idle, "the offer is over")
        wait_until(lambda: prefill.step(EMPTY) and pool.blocks[7].ref_cnt == 1, "one is left")

        assert pool.get_num_free_blocks() == NUM_BLOCKS - 1 - len(BLOCKS[0])
        pool.free_blocks(pool.blocks[one] for one in reversed(BLOCKS[0]))
        assert pool.get_num_free_blocks() == NUM_BLOCKS - 1


@pytest.mark.parametrize("drains", [False, True])
def test_vllm_steps_on_for_a_while_after_an_offer_and_to_the_last_one_where_it_drains(
    monkeypatch: pytest.MonkeyPatch, drains: bool
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    held = HeldBlocks(pool_of_requests(), drains=drains)
    assert not held.needs_steps
    held.hold("one", BLOCKS)
    assert held.needs_steps
    now_s += held_blocks.STEPS_ON_S

    assert held.needs_steps == drains
    held.free(["one"])
    assert not held.needs_steps


def test_a_window_has_left_nothing_to_hold_behind() -> None:
    pool = pool_of_requests()
    held = HeldBlocks(pool, drains=False)
    held.hold("one", [[0, 0, 9]])
    assert pool.null_block.ref_cnt == 0
    held.free(["one"])

    assert pool.null_block.ref_cnt == 0
    assert pool.blocks[9].ref_cnt == 1


@pytest.mark.parametrize("kind", OTHER)
def test_another_request_is_not_loaded(agents: Agents, kind: str) -> None:
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill)

        assert not loaded(decode, request_of(params, **OTHER[kind]()))


def test_an_image_of_the_next_turn_does_not_matter(agents: Agents) -> None:
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill, **with_image("one"))
        both = with_image("one")["mm_features"] + with_image("new", PROMPT_TOKENS)["mm_features"]
        prompt = [*PROMPT, 1, 2, 3, 4]

        assert loaded(decode, request_of(params, prompt, mm_features=both))


def test_the_image_of_another_request_is_not_used(agents: Agents) -> None:
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill, **with_image("one"))

        assert not loaded(decode, request_of(params, **with_image("two")))


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR], ids=str
)
def test_what_did_not_end_well_is_not_offered(agents: Agents, status: RequestStatus) -> None:
    with scheduler_side(agents.all[0]) as prefill:
        request = request_of({"do_remote_decode": True})

        assert finish(agents.all[0], prefill, request, status) == (False, None)
        wait_until(agents.all[0].idle, "the reservation is gone")


def test_a_prompt_with_embeddings_is_not_offered(agents: Agents) -> None:
    with scheduler_side(agents.all[0]) as prefill:
        embeds = torch.zeros(PROMPT_TOKENS, 8)
        request = request_of({"do_remote_decode": True}, prompt=None, prompt_embeds=embeds)

        ended = finish(agents.all[0], prefill, request, RequestStatus.FINISHED_LENGTH_CAPPED)

        assert ended == (False, None)
        wait_until(agents.all[0].idle, "the reservation is gone")


@pytest.mark.parametrize(("window", "num_tokens"), [(None, PROMPT_TOKENS), (32, PROMPT_TOKENS - 1)])
def test_with_a_window_the_last_token_of_a_prompt_is_left_to_decode(
    agents: Agents, window: int | None, num_tokens: int
) -> None:
    with scheduler_side(agents.all[0], window=window) as prefill:
        request = request_of({"do_remote_decode": True})

        prefill.expect(request)

        assert request.num_prompt_tokens == request.num_tokens == num_tokens
        assert list(request.all_token_ids) == PROMPT[:num_tokens]


def test_with_a_window_a_prompt_that_has_embeddings_is_left_whole(agents: Agents) -> None:
    """vLLM's worker ends when the tokens are not as many as the embeddings."""
    with scheduler_side(agents.all[0], window=32) as prefill:
        embeds = torch.zeros(PROMPT_TOKENS, 8)
        request = request_of({"do_remote_decode": True}, prompt_embeds=embeds)

        prefill.expect(request)

        assert request.prompt_token_ids == PROMPT
        assert request.num_prompt_tokens == PROMPT_TOKENS


def test_the_offer_of_a_request_that_decode_has_refused_is_given_back(agents: Agents) -> None:
    """vLLM's frontend tells of it by a request of one token that is aborted at once."""
    with scheduler_side(agents.all[0]) as prefill, scheduler_side(agents.all[1]) as decode:
        params = prefilled(agents.all[0], prefill)
        refused = request_of(params, [0], abort_immediately=True)
        decode.expect(refused)
        refused.status = RequestStatus.FINISHED_ABORTED
        decode.finished(refused, [[]])

        wait_until(agents.all[0].idle, "the offer is over")


def test_a_prompt_of_one_token_is_left_whole(agents: Agents) -> None:
    with scheduler_side(agents.all[0], window=32) as prefill:
        request = request_of({"do_remote_decode": True}, prompt=[5])

        prefill.expect(request)

        assert list(request.all_token_ids) == [5]


@pytest.mark.parametrize(
    ("vllms", "ours"), [(0, 0), (5, -5), (-5, 5), (2**40, -(2**31)), (-(2**40), 2**31 - 1)]
)
def test_a_request_that_vllm_takes_earlier_is_more_urgent(vllms: int, ours: int) -> None:
    assert urgency_of(request_of({}, priority=vllms)) == ours


def test_ranks_are_elsewhere_whose_agent_is_not_that_of_the_first() -> None:
    workers = [
        WorkerPlace(
            rank, f"tcp://10.0.0.{1 + rank // 2}:7711", f"{ACCESS}{rank}", f"key{rank // 2}"
        )
        for rank in range(6)
    ]

    elsewhere = ranks_elsewhere(workers)

    assert elsewhere == [
        AgentRanks("tcp://10.0.0.2:7711", (2, 3), f"{ACCESS}2", "key1"),
        AgentRanks("tcp://10.0.0.3:7711", (4, 5), f"{ACCESS}4", "key2"),
    ]


def test_ranks_that_met_no_agent_are_not_elsewhere() -> None:
    workers = [WorkerPlace(0, "tcp://10.0.0.1:7711", ACCESS), WorkerPlace(1, "", ACCESS)]

    assert ranks_elsewhere(workers) == []


def test_where_the_first_rank_met_no_agent_none_is_elsewhere() -> None:
    workers = [WorkerPlace(0, "", ACCESS), WorkerPlace(1, "tcp://10.0.0.1:7711", ACCESS)]

    assert ranks_elsewhere(workers) == []
