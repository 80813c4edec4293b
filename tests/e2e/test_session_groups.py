"""What the SDK says of windows, states and ranks elsewhere is what the agents move."""

from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from kvbus.engine import BlockingDecode, BlockingMemory, BlockingPrefill, KvCache
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import EngineSpec, GroupSpec, KvPart, StatePart, state_group
from kvbus.protocol import Outcome
from tests.e2e.spread_engines import ACCESS
from tests.engines import FULL, NHD, make_spec
from tests.strict_sessions import overwrite_once_released

WINDOW = GroupSpec("window", (2,), 4, 6, 8, "bfloat16", window=10)
STATE = state_group("state", (3,), (StatePart("conv", 4, 6), StatePart("norm", 1, 3)))
GROUPS = (FULL, WINDOW, STATE)
PLACES = [
    *((layer, part) for layer in (0, 1, 2) for part in ("k", "v")),
    (3, "conv"),
    (3, "norm"),
]


def filled(attach: Path, spec: EngineSpec, stack: ExitStack, *, rank: int = 0) -> KvCache:
    """The cache of one rank, full of random bytes."""
    memory = stack.enter_context(BlockingMemory(attach, spec, rank, access=ACCESS))
    cache = memory.allocate(NHD, num_blocks={"full": 8, "window": 8, "state": 4})
    for layer, part in PLACES:
        view = cache.view(layer, part)
        view.copy_(torch.randint(1, 100, view.shape).to(view.dtype))
    return cache


def test_a_window_moves_its_tail_a_state_its_bytes_and_the_rest_is_zeroed_on_demand(
    prefill, decode
):
    specs = [make_spec(groups=GROUPS) for _ in range(2)]
    with ExitStack() as stack:
        sent = filled(prefill.attach, specs[0], stack)
        got = filled(decode.attach, specs[1], stack)
        source = stack.enter_context(BlockingPrefill(prefill.attach, specs[0]))
        target = stack.enter_context(BlockingDecode(decode.attach, specs[1]))
        for session in (source, target):
            session.register()
            session.ready()
        written = {place: sent.view(*place).clone() for place in PLACES}
        theirs = {"full": [5, 2, 7], "window": [3, 1, 0], "state": [2]}

        offer = source.offer("r", num_tokens=40, block_ids=theirs, first_blocks={"window": 7})
        overwrite_once_released(offer, sent, theirs)
        fetch = target.fetch(
            offer.ticket,
            num_tokens=40,
            block_ids={"full": [1, 0, 3], "window": [6, 5, 4], "state": [3]},
            zero_tail=True,
        )
        target.wait_completed(fetch)

        full = [got.view(0, KvPart.VALUE), written[0, KvPart.VALUE]]
        assert torch.equal(full[0][[1, 0]], full[1][[5, 2]])
        assert torch.equal(full[0][3, :8], full[1][7, :8])
        assert not full[0][3, 8:].any()
        window = [got.view(2, KvPart.KEY), written[2, KvPart.KEY]]
        assert torch.equal(window[0][[6, 5, 4]], window[1][[3, 1, 0]])  # with positions 28 and 29
        assert fetch.notice.whole_blocks
        for part in ("conv", "norm"):
            assert torch.equal(got.view(3, part)[3], written[3, part][2])
        assert source.wait_released(offer) is Outcome.COMPLETED


def test_a_fetch_behind_all_tokens_may_leave_every_group_out(prefill, decode):
    specs = [make_spec(groups=GROUPS) for _ in range(2)]
    with ExitStack() as stack:
        filled(prefill.attach, specs[0], stack)
        filled(decode.attach, specs[1], stack)
        source = stack.enter_context(BlockingPrefill(prefill.attach, specs[0]))
        target = stack.enter_context(BlockingDecode(decode.attach, specs[1]))
        for session in (source, target):
            session.register()
            session.ready()

        offer = source.offer(
            "r", num_tokens=3, block_ids={"full": [5], "window": [3], "state": [2]}
        )
        fetch = target.fetch(offer.ticket, num_tokens=3, first_token=3, block_ids={})

        assert target.wait_completed(fetch).num_bytes == 0
        assert source.wait_released(offer) is Outcome.COMPLETED


@pytest.mark.parametrize(
    "others",
    [
        {"tcp://127.0.0.1:1": (2,)},
        {"tcp://127.0.0.1:1": (0, 1)},
        {"tcp://127.0.0.1:1": (1,), "tcp://127.0.0.1:2": (1,)},
    ],
    ids=["number_too_high", "none_at_home", "twice"],
)
def test_ranks_elsewhere_that_cannot_be_are_refused_by_name(prefill, others):
    spec = make_spec(tp=2)
    with BlockingPrefill(prefill.attach, spec) as session:
        with pytest.raises(RequestRefused) as refused:
            session.register(others=others, access=ACCESS)

        assert refused.value.code is ErrorCode.GEOMETRY
        assert refused.value.detail["field"] == "others"


def test_a_decode_engine_at_two_agents_gets_the_heads_of_both_ranks(prefill, decode, other_decode):
    theirs, ours = make_spec(), make_spec(tp=2)
    with ExitStack() as stack:
        memories = [
            stack.enter_context(BlockingMemory(attach, spec, rank, access=ACCESS))
            for attach, spec, rank in (
                (prefill.attach, theirs, 0),
                (decode.attach, ours, 0),
                (other_decode.attach, ours, 1),
            )
        ]
        cache, *caches = (memory.allocate(NHD, num_blocks=8) for memory in memories)
        sent, *got = (one.view(0, "k") for one in (cache, *caches))
        sent.copy_(torch.randint(1, 100, sent.shape).to(sent.dtype))
        source = stack.enter_context(BlockingPrefill(prefill.attach, theirs))
        target = stack.enter_context(BlockingDecode(decode.attach, ours))
        source.register()
        elsewhere = memories[2].session.agent.peer_endpoint
        target.register(others={elsewhere: [1]}, access=ACCESS)
        source.ready()
        target.ready()

        written = sent.clone()
        offer = source.offer("r", num_tokens=32, block_ids={"full": [5, 2]})
        overwrite_once_released(offer, cache, {"full": [5, 2]})
        fetch = target.fetch(offer.ticket, num_tokens=32, block_ids={"full": [1, 0]})
        target.wait_completed(fetch)

        assert torch.equal(torch.cat(got, dim=2)[[1, 0]], written[[5, 2]])
