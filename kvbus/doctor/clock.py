"""Says how far the wall clock of an agent is from another one.

Refuses to say which of the two is right.
"""

import time

import anyio

from kvbus.bus import agent_client
from kvbus.clocks import ClockOffset, Exchange
from kvbus.doctor import asking
from kvbus.doctor.asking import PeerToCheck
from kvbus.doctor.finding import NOTE, OK, WARNING, Finding
from kvbus.errors import KVBusError
from kvbus.protocol.ticket import CLOCK_TOLERANCE_S
from kvbus.protocol.trace import Trace
from kvbus.text import time_text

NUM_EXCHANGES = 8
APART_S = 1.0
"""From here on lines of logs are out of order that are of one handoff."""
WHY = (
    "Lines of logs, and spans of a collector, have the wall clock of their machine: those of one "
    f"handoff do not stand side by side. From {CLOCK_TOLERANCE_S} s on signed tickets are refused."
)
FIX = "Let both machines follow the same time server, by chrony or another client of NTP."


def clock_here(peer: PeerToCheck) -> Finding:
    """Its clock beside that of this machine."""
    return clock_finding(peer, anyio.run(_ask, peer), whose="this machine's")


def clock_between(peer: PeerToCheck, reader: PeerToCheck) -> Finding:
    """Its clock beside that of another agent, by where both lie on ours."""
    clock, other = anyio.run(_ask, peer), anyio.run(_ask, reader)
    if isinstance(clock, ClockOffset) and isinstance(other, ClockOffset):
        offset_s = clock.offset_s - other.offset_s
        clock = ClockOffset(offset_s, clock.error_s + other.error_s)
    elif isinstance(other, KVBusError):
        clock = other
    return clock_finding(peer, clock, whose="that of --from")


def clock_finding(peer: PeerToCheck, clock: ClockOffset | KVBusError, *, whose: str) -> Finding:
    """``clock`` leads from the agent's to the one that is ``whose``, or says why it is unknown."""
    if isinstance(clock, KVBusError):
        found = f"not looked at, as an agent does not tell its wall clock: {clock.message}"
        return Finding("peer.clock", NOTE, found, {"endpoint": peer.endpoint})
    apart_s = abs(clock.offset_s)
    is_apart = apart_s >= APART_S and apart_s > clock.error_s
    side = "behind" if clock.offset_s > 0 else "ahead of"
    return Finding(
        "peer.clock",
        WARNING if is_apart else OK,
        f"its wall clock is {time_text(apart_s)} {side} {whose}, ±{time_text(clock.error_s)}",
        {"endpoint": peer.endpoint, "ahead_s": -clock.offset_s, "error_s": clock.error_s},
        why=WHY,
        fix=FIX,
        command="chronyc tracking",
    )


async def _ask(peer: PeerToCheck) -> ClockOffset | KVBusError:
    exchanges: list[Exchange] = []
    async with agent_client(peer.endpoint, curve=peer.curve) as client:
        try:
            for _ in range(NUM_EXCHANGES):
                sent_s = time.time()
                answer = await client.ask(Trace(), timeout_s=asking.ANSWER_S)
                exchanges.append(Exchange(sent_s, answer.wall_s, time.time()))
        except KVBusError as error:
            return error
    return ClockOffset.of(exchanges)
