"""The way that an agent chooses by itself, what it imports for that, and whose turn it is first."""

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.errors import ErrorCode
from kvbus.geometry import GroupSpec, KvLayout, KvPart
from tests.agents import AgentProcess, Agents, agents_ended, until, wait_until
from tests.engines import Engine, failure_of, pair, same, story_of, works
from tests.expected import expected_after
from tests.memories import Memory
from tests.namespaces import HAVE_NAMESPACES, hosts, link
from tests.process.shapes import ShapedAgents, Side, hand_over, two_engines

pytestmark = pytest.mark.anyio

MAX_ANONYMOUS_BYTES = 80_000_000
UNREGISTERED = Side(memory=Memory(direct=False))
LATENT = GroupSpec("latent", tuple(range(8)), 256, 1, 576, "bfloat16", (KvPart.LATENT,))
REPLICAS = GroupSpec("full", tuple(range(4)), 64, 2, 128, "bfloat16")
ALIKE = {"latent": (LATENT, 1), "replicas": (REPLICAS, 2)}
"""A group, and the ranks of the prefill engine; the decode engine has 8."""
NUM_TOKENS = 1000
COPY_BYTES = {"latent": NUM_TOKENS * 8 * 576 * 2, "replicas": NUM_TOKENS * 4 * 2 * 2 * 128 * 2}
"""All that the tokens need, once."""
OVER_TCP: dict[str, Any] = {"env": {"UCX_TLS": "tcp"}, "mapped": False}
INTERFACE, ADDRESSES = "kv0", ("10.211.7.1", "10.211.7.2")


@pytest.fixture(scope="module")
def shared_machine() -> Iterator[Agents]:
    """A prefill agent that lends and one that does not, and three decode agents.

    One borrows, one must borrow, and one has measured its reads.
    """
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill"),
            agents.prepare("prefill", mapped=False),
            agents.prepare("decode", mapped=True),
            agents.prepare("decode", mapped=True, path="mapped"),
            agents.prepare("decode", calibrate=True),
        )
        yield agents


@pytest.fixture
def machine(shared_machine: Agents) -> Iterator[list[AgentProcess]]:
    """They hold nothing after each test."""
    yield shared_machine.all
    shared_machine.check()


def between(prefill: AgentProcess, decode: AgentProcess) -> ShapedAgents:
    return ShapedAgents(prefill, {"auto": decode})


async def test_kv_of_one_machine_is_copied_on_cold_and_on_warm_routes_and_without_torch(
    machine: list[AgentProcess],
) -> None:
    prefill, _, decode, *_ = machine
    sides = Side(tp=2, block_size=48), Side(block_size=32, memory=Memory(KvLayout.parse("HND")))
    async with two_engines(between(prefill, decode), "auto", *sides) as engines:
        fetched = [await hand_over(*engines, num_tokens) for num_tokens in (71, 100, 3)]

    assert [one.path for one in fetched] == ["mapped"] * 3
    assert not imported_torch(decode)
    assert decode.metric("outstanding_handles") == 0


async def test_kv_of_an_agent_that_does_not_lend_is_read_with_nixl_or_not_at_all(
    machine: list[AgentProcess],
) -> None:
    _, closed, decode, forced, _ = machine
    async with two_engines(between(closed, decode), "auto", Side(), Side()) as engines:
        fetched = [await hand_over(*engines, 71) for _ in range(2)]
    async with two_engines(between(closed, forced), "auto", Side(), Side()) as (source, target):
        blocks = source.some_blocks(5, 20), target.some_blocks(6, 20)
        offer = await source.prefill.offer("r", num_tokens=20, block_ids=blocks[0])
        failure = await failure_of(
            target.decode.fetch(offer.ticket, num_tokens=20, block_ids=blocks[1])
        )
        await offer.withdraw()

    assert [one.path for one in fetched] == ["direct"] * 2
    assert failure.code is ErrorCode.CONFIG
    assert "forces 'mapped', but the memory of the prefill engine" in failure.message
    assert "by the prefill agent's config (mapped = false)" in failure.message


async def test_torch_is_imported_when_something_needs_it_and_before_the_lease(
    machine: list[AgentProcess],
) -> None:
    prefill, decode = machine[1], machine[4]
    wait_until(lambda: rates_of(decode, "reads"), "reads are measured")
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        without = [imported_torch(agent) for agent in (prefill, decode)]
        anonymous = [anonymous_bytes(agent) for agent in (prefill, decode)]
        stories = [await story(source, target, zero_tail=zero) for zero in (False, True, True)]
    async with two_engines(between(prefill, decode), "auto", UNREGISTERED, UNREGISTERED) as engines:
        await until(lambda: imported_torch(prefill))
        await hand_over(*engines, 71)
        await hand_over(*engines, 71)
    wait_until(lambda: rates_of(decode, "copies"), "copies are measured")

    assert without == [False, False]
    assert max(anonymous) < MAX_ANONYMOUS_BYTES
    waits = [any("PeerReady" in line for line in told) for told in stories]
    assert waits == [False, True, False], "it is there when the first tail is zeroed"


async def story(source: Engine, target: Engine, *, zero_tail: bool) -> list[str]:
    """That of a fetch that completed."""
    theirs, ours = source.some_blocks(3, 40), target.some_blocks(4, 40)
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=40, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, num_tokens=40, block_ids=ours, zero_tail=zero_tail)
    await fetch.completed()
    await offer.released()
    return await anyio.to_thread.run_sync(story_of, target, fetch)


def rates_of(decode: AgentProcess, part: str) -> list[Any]:
    events = ("rates.measured", "rates.defaulted")
    return [line for event in events for line in decode.logged(event, part=part)]


def imported_torch(agent: AgentProcess) -> bool:
    return agent.memory_maps("libtorch") > 0


def anonymous_bytes(agent: AgentProcess) -> int:
    """What it has of memory that no file stands for, and nobody else has."""
    lines = Path(f"/proc/{agent.pid}/status").read_text().splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(size) * 1024


def start_calibrated(agents: Agents, decode: AgentProcess) -> None:
    """Return once the decode agent knows how fast its wire is.

    On a busy machine it gives up measuring, which it does at its start only.
    """
    decode.settings["calibrate"] = True
    agents.start(*agents.all)
    while not decode.logged("rates.measured", part="reads"):
        if decode.logged("rates.defaulted", part="reads"):
            decode.ask_to_end()
            decode.end()
            decode.start()
        wait_until(lambda: rates_of(decode, "reads"), "an attempt to measure")


async def test_what_ranks_hold_alike_comes_off_a_slow_wire_once(fresh: Agents) -> None:
    prefill, decode = fresh.prepare("prefill", **OVER_TCP), fresh.prepare("decode", **OVER_TCP)
    start_calibrated(fresh, decode)
    for group, tp_size in ALIKE.values():
        sides = Side(tp=tp_size), Side(tp=8)
        shape: dict[str, Any] = {"groups": [group], "max_tokens": NUM_TOKENS}
        async with two_engines(between(prefill, decode), "auto", *sides, **shape) as engines:
            before = prefill.metric("packed_bytes_total"), decode.metric("read_bytes_total")

            fetched = await hand_over(*engines, NUM_TOKENS)

            packed = prefill.metric("packed_bytes_total") - before[0]
            read = decode.metric("read_bytes_total") - before[1]
            assert fetched.path == "packed"
            assert (
                packed
                == read
                == fetched.num_bytes
                == COPY_BYTES[group.name.replace("full", "replicas")]
            )


async def test_on_shared_memory_each_rank_reads_long_runs_for_itself(
    prefill: AgentProcess, decode: AgentProcess
) -> None:
    shape: dict[str, Any] = {"groups": [LATENT], "max_tokens": NUM_TOKENS}
    async with two_engines(
        between(prefill, decode), "auto", Side(), Side(tp=8), **shape
    ) as engines:
        fetched = await hand_over(*engines, NUM_TOKENS)

    assert fetched.path == "direct"


@pytest.mark.long
@pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2")
@pytest.mark.parametrize("shape", ALIKE)
async def test_between_two_machines_one_copy_passes_the_network(fresh: Agents, shape: str) -> None:
    group, tp_size = ALIKE[shape]
    with hosts("prefill", "decode") as made:
        ends = [made["prefill"], made["decode"]]
        at = [(host, f"{address}/24") for host, address in zip(ends, ADDRESSES, strict=True)]
        link(INTERFACE, one=at[0], other=at[1])
        for role, host, address in zip(made, ends, ADDRESSES, strict=True):
            agent = fresh.prepare(
                role,
                **OVER_TCP,
                peer_bind=f"tcp://{address}:7701",
                events_bind=f"tcp://{address}:7702",
                data_interfaces=[INTERFACE],
                insecure=True,
            )
            agent.runner = host.command
        prefill, decode = fresh.all
        start_calibrated(fresh, decode)
        sides = Side(tp=tp_size), Side(tp=8)
        sizes: dict[str, Any] = {"groups": [group], "max_tokens": NUM_TOKENS}
        async with two_engines(between(prefill, decode), "auto", *sides, **sizes) as engines:
            await hand_over(*engines, 1)
            passed = []
            for _ in range(2):  # on a busy machine TCP sends some of it again, now and then
                before = ends[1].received_bytes(INTERFACE)

                fetched = await hand_over(*engines, NUM_TOKENS)

                passed.append(ends[1].received_bytes(INTERFACE) - before)
                assert fetched.path == "packed"
        assert COPY_BYTES[shape] <= min(passed) <= 1.02 * COPY_BYTES[shape]


async def test_an_urgent_fetch_waits_for_less_than_those_that_came_before_it(
    fresh: Agents,
) -> None:
    """While the prefill agent is stopped, each fetch gives its place on after a second."""
    prefill, decode = (
        fresh.prepare("prefill"),
        fresh.prepare("decode", fetches_at_once=1, request_timeout_s=60.0),
    )
    fresh.start(prefill, decode)
    priorities = {"first": 0, "second": 0, "third": -1, "urgent": 1}
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        theirs, ours = source.some_blocks(3, 40), target.some_blocks(4, 40)
        wanted = expected_after(target.snapshot(), source, theirs, target, ours, num_tokens=40)
        offers = {
            name: await source.prefill.offer(uuid.uuid4().hex, num_tokens=40, block_ids=theirs)
            for name in priorities
        }
        prefill.signal(signal.SIGSTOP)
        fetches = {
            name: target.decode.fetch(
                offers[name].ticket, num_tokens=40, block_ids=ours, priority=priority
            )
            for name, priority in priorities.items()
        }
        await until(lambda: decode.status()["counts"]["queued_fetches"] <= 1)
        prefill.signal(signal.SIGCONT)
        queued_s = {
            name: (await fetch.completed()).stages_s.queued for name, fetch in fetches.items()
        }

        as_they_began = sorted(queued_s, key=queued_s.__getitem__)
        assert as_they_began == ["first", "urgent", "second", "third"]
        assert same(target.snapshot(), wanted)
