"""What several ranks hold alike comes off a slow wire once, and is copied to each of them."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvbus.geometry import GroupSpec, KvPart
from tests.agents import AgentProcess, Agents, agents_ended, wait_until
from tests.e2e.shapes import ShapedAgents, Side, hand_over, two_engines
from tests.namespaces import HAVE_NAMESPACES, hosts, link

pytestmark = pytest.mark.anyio

LATENT = GroupSpec("latent", tuple(range(8)), 256, 1, 576, "bfloat16", (KvPart.LATENT,))
REPLICAS = GroupSpec("full", tuple(range(4)), 64, 2, 128, "bfloat16")
SHAPES = {"latent": (LATENT, 1), "replicas": (REPLICAS, 2)}
"""A group, and the ranks of the prefill engine; the decode engine has 8."""
NUM_TOKENS = 1000
COPY_BYTES = {"latent": NUM_TOKENS * 8 * 576 * 2, "replicas": NUM_TOKENS * 4 * 2 * 2 * 128 * 2}
"""All that the tokens need, once."""
OVER_TCP = {"env": {"UCX_TLS": "tcp"}}
MEASURED = {"rates.measured", "rates.defaulted"}
READ = {"mapped": False}
"""What agents of one machine would copy, these read."""
INTERFACE, ADDRESSES = "kv0", ("10.211.7.1", "10.211.7.2")
ON_ONE_MACHINE: tuple[dict[str, Any], ...] = ({}, {})


def site(agents: Agents, *ends: dict[str, Any], **settings: Any) -> ShapedAgents:
    """A prefill agent and a decode agent, each with settings of its own."""
    of_prefill, of_decode = ends or ON_ONE_MACHINE
    prefill = agents.prepare("prefill", **READ, **settings, **of_prefill)
    decode = agents.prepare("decode", **READ, **settings, **of_decode)
    return ShapedAgents(prefill, {"auto": decode})


def start_calibrated(agents: Agents, made: ShapedAgents) -> None:
    """Return once the decode agent knows how fast its wire is.

    On a busy machine it gives up measuring, which it does at its start only.
    """
    decode = made.decode["auto"]
    decode.settings["calibrate"] = True
    agents.start(*agents.all)
    while not decode.logged("rates.measured", part="reads"):
        if decode.logged("rates.defaulted", part="reads"):
            decode.ask_to_end()
            decode.end()
            decode.start()
        wait_until(lambda: events_of(decode) & MEASURED, "an attempt to measure")


def events_of(agent: AgentProcess) -> set[str]:
    """What it has logged."""
    return {line["event"] for line in agent.log()}


@pytest.fixture(scope="module")
def shared_tcp() -> Iterator[tuple[Agents, ShapedAgents]]:
    """Agents that reach each other over TCP only."""
    with agents_ended(Agents) as agents:
        made = site(agents, **OVER_TCP)
        start_calibrated(agents, made)
        yield agents, made


@pytest.fixture
def tcp(shared_tcp: tuple[Agents, ShapedAgents]) -> Iterator[ShapedAgents]:
    """The agents, which must hold nothing after each test."""
    agents, made = shared_tcp
    yield made
    agents.check()


@pytest.mark.parametrize("shape", SHAPES)
async def test_over_tcp_the_first_fetch_reads_what_ranks_hold_alike_once(tcp, shape):
    group, tp_size = SHAPES[shape]
    prefill, decode = tcp.prefill, tcp.decode["auto"]
    sides = Side(tp=tp_size), Side(tp=8)
    async with two_engines(tcp, "auto", *sides, groups=[group], max_tokens=NUM_TOKENS) as (
        source,
        target,
    ):
        before = prefill.metric("packed_bytes_total"), decode.metric("read_bytes_total")

        fetched = await hand_over(source, target, NUM_TOKENS)

        packed = prefill.metric("packed_bytes_total") - before[0]
        read = decode.metric("read_bytes_total") - before[1]
        assert fetched.path == "packed"
        assert packed == read == fetched.num_bytes == COPY_BYTES[shape]


@pytest.mark.skipif(not HAVE_NAMESPACES, reason="needs root and iproute2")
@pytest.mark.parametrize("shape", SHAPES)
async def test_between_two_machines_one_copy_passes_the_network(shape):
    group, tp_size = SHAPES[shape]
    with hosts("prefill", "decode") as made, agents_ended(Agents) as agents:
        ends = [made["prefill"], made["decode"]]
        link(
            INTERFACE,
            **{
                name: (host, f"{address}/24")
                for name, host, address in zip(("one", "other"), ends, ADDRESSES, strict=True)
            },
        )
        found = site(agents, *(on_the_link(address) for address in ADDRESSES), **OVER_TCP)
        for agent, host in zip(agents.all, ends, strict=True):
            agent.runner = host.command
        start_calibrated(agents, found)
        sides = Side(tp=tp_size), Side(tp=8)
        async with two_engines(found, "auto", *sides, groups=[group], max_tokens=NUM_TOKENS) as (
            source,
            target,
        ):
            await hand_over(source, target, 1)
            passed = []
            for _ in range(2):  # on a busy machine TCP sends some of it again, now and then
                before = ends[1].received_bytes(INTERFACE)

                fetched = await hand_over(source, target, NUM_TOKENS)

                passed.append(ends[1].received_bytes(INTERFACE) - before)
                assert fetched.path == "packed"
        assert COPY_BYTES[shape] <= min(passed) <= 1.02 * COPY_BYTES[shape]


def on_the_link(address: str) -> dict[str, Any]:
    """All sockets of an agent at an address of the link."""
    return {
        "peer_bind": f"tcp://{address}:7701",
        "events_bind": f"tcp://{address}:7702",
        "data_interfaces": [INTERFACE],
        "insecure": True,
    }


async def test_on_shared_memory_each_rank_reads_long_runs_for_itself():
    with agents_ended(Agents) as agents:
        found = site(agents)
        agents.start(*agents.all)
        async with two_engines(
            found, "auto", Side(tp=1), Side(tp=8), groups=[LATENT], max_tokens=NUM_TOKENS
        ) as (source, target):
            fetched = await hand_over(source, target, NUM_TOKENS)

        assert fetched.path == "direct"
        agents.check()
