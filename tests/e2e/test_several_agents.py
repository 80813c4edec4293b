"""Engines whose ranks are spread over several agents hand KV over like any others."""

from collections.abc import Iterator, Sequence
from random import Random

import anyio
import pytest
import torch

from kvbus.engine import DecodeSession, MemorySession, PrefillSession
from kvbus.errors import ErrorCode, RequestRefused
from kvbus.geometry import GroupSpec, KvLayout
from kvbus.protocol import AgentRanks, Outcome
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.e2e.spread_engines import ACCESS, spread_engine
from tests.engines import FULL, NHD, SMALL, failure_of, make_spec, same, works
from tests.expected import expected_after, num_pieces_compared, num_read_bytes

pytestmark = pytest.mark.anyio

HND = KvLayout.parse("HND")
PATHS = ("direct", "packed", "mapped")
RING = {"staging_bytes": 8 * 65536, "slot_bytes": 65536}
COMPARED = {"mapped": True, "digest": "full"}
LATENT = GroupSpec("latent", (0, 1), 16, 1, 64, "bfloat16", parts=("latent",))
FEW = GroupSpec("few", (0, 1), 16, 2, 8, "bfloat16")


class Sites:
    """Two prefill agents, and two decode agents for each of some paths."""

    def __init__(self, agents: Agents) -> None:
        self.agents = agents
        self.prefill: list[AgentProcess] = [agents.prepare("prefill", **RING) for _ in range(2)]
        self.direct, self.packed, self.mapped = (
            [
                agents.prepare("decode", **RING, path=path, mapped=True, digest="full")
                for _ in range(2)
            ]
            for path in PATHS
        )

    def at(self, role: str, places: str) -> list[AgentProcess]:
        """The agents of ranks 0, 1 and so on, by number."""
        agents: Sequence[AgentProcess] = getattr(self, role)
        return [agents[int(number)] for number in places]


@pytest.fixture(scope="module")
def shared_sites() -> Iterator[Sites]:
    """The agents of this file, ended with its last test."""
    with agents_ended(Agents) as agents:
        sites = Sites(agents)
        for side in (sites.prefill, sites.direct, sites.packed, sites.mapped):
            agents.start(*side)  # each imports torch: all at once would take too long
        yield sites


@pytest.fixture
def sites(shared_sites: Sites) -> Iterator[Sites]:
    """The agents, which must hold nothing after each test."""
    yield shared_sites
    shared_sites.agents.check()


def num_compared(sites: Sites, path: str) -> float:
    """Pieces that the agents of a path have found equal, for themselves and for each other."""
    agents = sites.at(path, "01")
    return sum(agent.metric("digests_total", outcome="equal") for agent in agents)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [("01", "0"), ("01", "00"), ("00", "01"), ("01", "01"), ("01", "001"), ("011", "01")],
)
async def test_every_bit_arrives_whatever_agents_the_ranks_are_at(sites, path, prefill, decode):
    num_tokens = 16 * 5 + 7
    async with (
        spread_engine(PrefillSession, sites.at("prefill", prefill), seed=1) as source,
        spread_engine(DecodeSession, sites.at(path, decode), seed=2) as target,
    ):
        theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
        wanted = expected_after(
            target.snapshot(), source, theirs, target, ours, num_tokens=num_tokens
        )
        before = num_compared(sites, path)

        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
        fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
        fetched = await fetch.completed()
        outcome = await offer.released()

        assert same(target.snapshot(), wanted)
        assert outcome is Outcome.COMPLETED
        assert fetched.num_bytes == num_read_bytes(
            source, target, num_tokens, path=path, places=decode
        )
        assert fetched.path == path
        assert num_compared(sites, path) - before == num_pieces_compared(source, target, num_tokens)
        assert all(agent.metric("progress_tokens") == 0 for agent in sites.prefill)


@pytest.mark.parametrize(("prefill", "decode"), [("01", "0"), ("00", "01")])
async def test_an_engine_at_several_agents_claims_first_on_any_route(sites, prefill, decode):
    async with (
        spread_engine(PrefillSession, sites.at("prefill", prefill), seed=1) as source,
        spread_engine(DecodeSession, sites.at("direct", decode), seed=2) as target,
    ):
        assert await works(source, target)
        assert await works(source, target)
    lines = sites.direct[0].says("handoff.completed", engine_id=target.spec.engine_id)
    assert [(line["ahead"], line["leased"]) for line in lines[-2:]] == [(False, True)] * 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("group", "prefill", "decode"),
    [(FEW, "0101", "01"), (FEW, "01", "0011"), (FEW, "011", "0101"), (LATENT, "011", "01")],
    ids=["4 to 2", "2 to 4", "3 to 4", "latent"],
)
async def test_replicas_at_several_agents_are_read_once_whichever_they_are(
    sites, path, group, prefill, decode
):
    num_tokens = 35
    specs = [make_spec(tp=len(places), groups=(group,)) for places in (prefill, decode)]
    async with (
        spread_engine(PrefillSession, sites.at("prefill", prefill), specs[0], seed=1) as source,
        spread_engine(DecodeSession, sites.at(path, decode), specs[1], seed=2) as target,
    ):
        for turn in range(len(prefill)):
            theirs, ours = source.some_blocks(turn, num_tokens), target.some_blocks(9, num_tokens)
            wanted = expected_after(
                target.snapshot(), source, theirs, target, ours, num_tokens=num_tokens
            )

            offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
            fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)
            fetched = await fetch.completed()

            assert same(target.snapshot(), wanted)
            assert fetched.num_bytes == num_read_bytes(
                source, target, num_tokens, path=path, places=decode
            )


@pytest.mark.parametrize("path", PATHS)
async def test_layouts_groups_a_prefix_hit_and_a_zeroed_tail_come_together(sites, path):
    num_tokens, first_token = 59, 21
    theirs_spec, ours_spec = (make_spec(tp=tp, groups=(FULL, SMALL)) for tp in (2, 3))
    async with (
        spread_engine(
            PrefillSession, sites.at("prefill", "01"), theirs_spec, layout=HND, seed=1
        ) as source,
        spread_engine(
            DecodeSession, sites.at(path, "010"), ours_spec, layout=NHD, seed=2
        ) as target,
    ):
        theirs = source.some_blocks(5, num_tokens)
        ours = target.some_blocks(6, num_tokens, first_token)
        wanted = expected_after(
            target.snapshot(),
            source,
            theirs,
            target,
            ours,
            num_tokens=num_tokens,
            first_token=first_token,
            zero_tail=True,
        )

        offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
        fetch = target.decode.fetch(
            offer.ticket,
            num_tokens=num_tokens,
            block_ids=ours,
            first_token=first_token,
            zero_tail=True,
        )
        await fetch.completed()

        assert same(target.snapshot(), wanted)


@pytest.mark.parametrize("path", PATHS)
async def test_an_open_offer_is_read_piece_by_piece_at_every_agent(sites, path):
    num_tokens, steps = 90, (20, 47, 48, 90)
    async with (
        spread_engine(PrefillSession, sites.at("prefill", "01"), seed=1) as source,
        spread_engine(DecodeSession, sites.at(path, "011"), seed=2) as target,
    ):
        theirs, ours = source.some_blocks(5, num_tokens), target.some_blocks(6, num_tokens)
        before = target.snapshot()
        wanted = expected_after(before, source, theirs, target, ours, num_tokens=num_tokens)
        offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []}, sealed=False)
        fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours)

        known = 0
        for num_ready in steps:
            needed = -(-num_ready // 16)
            await offer.extend(num_ready, {"full": theirs["full"][known:needed]})
            known, whole = needed, ours["full"][: num_ready // 16]
            await until(lambda whole=whole: _equal_in(target, wanted, whole))
        await offer.seal()
        fetched = await fetch.completed()

        assert same(target.snapshot(), wanted)
        assert fetched.num_bytes == num_read_bytes(
            source, target, num_tokens, path=path, places="010"
        )


def _equal_in(engine, wanted, blocks) -> bool:
    views = engine.views_of(wanted)
    return all(
        torch.equal(view[blocks], views[key][blocks]) for key, view in engine.views().items()
    )


async def test_many_handoffs_at_a_time_do_not_mix(sites):
    async with (
        spread_engine(PrefillSession, sites.at("prefill", "01"), seed=1) as source,
        spread_engine(DecodeSession, sites.at("packed", "01"), seed=2) as target,
    ):
        theirs, ours = source.some_blocks(5, 16 * 32), target.some_blocks(6, 16 * 32)
        wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=16 * 32)

        async def one(number: int) -> None:
            mine = {"full": theirs["full"][number : number + 1]}
            yours = {"full": ours["full"][number : number + 1]}
            offer = await source.prefill.offer(str(number), num_tokens=16, block_ids=mine)
            await target.decode.fetch(offer.ticket, num_tokens=16, block_ids=yours).completed()
            await offer.released()

        async with anyio.create_task_group() as tasks:
            for number in Random(0).sample(range(32), 32):
                tasks.start_soon(one, number)

        assert same(target.snapshot(), wanted)


async def test_a_rank_that_left_fails_the_fetch_and_one_that_came_back_is_read(sites):
    async with (
        spread_engine(PrefillSession, sites.at("prefill", "01"), seed=1) as source,
        spread_engine(DecodeSession, sites.at("direct", "01"), seed=2) as target,
    ):
        assert await works(source, target)
        offers = [
            await source.prefill.offer(request_id, num_tokens=16, block_ids={"full": [3]})
            for request_id in ("r", "s")
        ]

        await source.lose(1)
        gone = await failure_of(
            target.decode.fetch(offers[0].ticket, num_tokens=16, block_ids={"full": [3]})
        )
        nobody = await failure_of(
            target.decode.fetch(offers[1].ticket, num_tokens=16, block_ids={"full": [3]})
        )
        await source.bring_back(1)
        source.fill(3)

        assert gone.code in (ErrorCode.ENGINE_LOST, ErrorCode.TRANSFER_FAILED)
        assert (nobody.stage, nobody.code) == ("resolving", ErrorCode.ENGINE_UNKNOWN)
        assert sites.prefill[1].peer in nobody.message
        for offer in offers:
            await offer.withdraw()
            await offer.released()
        assert await works(source, target)


async def test_a_decode_rank_that_left_fails_the_fetch_and_one_that_came_back_is_filled(sites):
    async with (
        spread_engine(PrefillSession, sites.at("prefill", "01"), seed=1) as source,
        spread_engine(DecodeSession, sites.at("direct", "01"), seed=2) as target,
    ):
        assert await works(source, target)
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [3]})

        await target.lose(1)
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [3]})
        failure = await failure_of(fetch)
        await fetch.blocks_freed()
        await target.bring_back(1)
        await offer.withdraw()
        await offer.released()

        assert failure.code is ErrorCode.ENGINE_UNKNOWN
        assert await works(source, target)


ELSEWHERE = "tcp://127.0.0.1:1"


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({ELSEWHERE: [1, 1]}, "rank 1 is named twice"),
        ({ELSEWHERE: [1], "tcp://127.0.0.1:2": [1]}, "rank 1 is named twice"),
        ({ELSEWHERE: [2]}, "rank 2 of 2 ranks"),
        ({ELSEWHERE: [0]}, "rank 0 is named twice, or at two agents"),
        ({ELSEWHERE: [0, 1]}, "named twice|no rank is at the engine's home"),
        ([AgentRanks(ELSEWHERE, (1,), ACCESS)] * 2, "named twice"),
    ],
)
@pytest.mark.parametrize("kind", ["prefill", "direct"])
async def test_ranks_that_cannot_be_elsewhere_are_refused_by_name(sites, kind, others, reason):
    agent = sites.at(kind, "0")[0]
    session = PrefillSession if kind == "prefill" else DecodeSession
    spec = make_spec(tp=2)
    async with MemorySession(agent.attach, spec, 0) as rank, session(agent.attach, spec) as control:
        await rank.allocate(NHD, num_blocks=4)

        with pytest.raises(RequestRefused, match=reason) as refused:
            await control.register(others=others, access=ACCESS)

    assert refused.value.code is ErrorCode.GEOMETRY
    assert refused.value.detail == {"field": "others"}
    await until(lambda: not agent.status()["engines"])


async def test_all_ranks_elsewhere_and_a_rank_that_was_said_to_be_are_refused_by_name(sites):
    agent, spec = sites.prefill[0], make_spec(tp=2)
    async with (
        PrefillSession(agent.attach, spec) as control,
        MemorySession(agent.attach, spec, 1) as rank,
    ):
        with pytest.raises(RequestRefused, match="no rank is at the engine's home") as nowhere:
            await control.register(others={ELSEWHERE: [0, 1]}, access=ACCESS)
        await control.register(others={ELSEWHERE: [1]}, access=ACCESS)
        with pytest.raises(RequestRefused, match=f"rank 1 is at {ELSEWHERE}") as elsewhere:
            await rank.allocate(NHD, num_blocks=4)

    assert {nowhere.value.code, elsewhere.value.code} == {ErrorCode.GEOMETRY}
    await until(lambda: not agent.status()["engines"])


@pytest.mark.parametrize("whose", ["nobody's", "another agent's"])
async def test_an_agent_without_the_ranks_is_named_when_hands_are_shaken(sites, whose):
    endpoint = ELSEWHERE if whose == "nobody's" else sites.prefill[1].peer
    home, spec = sites.prefill[0], make_spec(tp=2)
    async with (
        PrefillSession(home.attach, spec) as control,
        MemorySession(home.attach, spec, 0) as rank,
        spread_engine(DecodeSession, sites.at("direct", "0")) as target,
    ):
        await rank.allocate(NHD, num_blocks=4)
        await control.register(others={endpoint: [1]}, access=ACCESS)
        offer = await control.offer("r", num_tokens=16, block_ids={"full": [3]})

        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [3]})
        failure = await failure_of(fetch)

        unreachable = ErrorCode.PEER_UNREACHABLE, ErrorCode.ENGINE_UNKNOWN
        assert failure.code is unreachable[whose != "nobody's"]
        assert failure.stage == "resolving"
        assert endpoint in failure.message
        await offer.withdraw()
