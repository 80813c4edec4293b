"""Says whether packets of full size come to an agent, and back from it: which way loses them.

    question, 8 KiB, echoed      ──▶ ──▶ agent ──▶ ──▶   both ways carry large packets
    question, 8 KiB, not echoed  ──▶ ──▶ agent ─────▶    the way there does

Only where the first has no answer the second is asked. Refuses to have an agent send more than it
was sent: who could would use agents against others.
"""

from collections.abc import Iterator
from shlex import quote

from kvbus.doctor.asking import (
    LEADS_TO,
    LOOK_THERE,
    PeerToCheck,
    answer_or_error,
    ask,
    finding,
)
from kvbus.doctor.finding import NOTE, Finding
from kvbus.errors import KVBusError, RequestTimeout
from kvbus.protocol.message import MAX_TEXT_CHARS
from kvbus.protocol.status import Status
from kvbus.protocol.trace import Trace

PADDING = MAX_TEXT_CHARS * "x"
NUM_BYTES = 2 * MAX_TEXT_CHARS
"""More than a packet of most networks holds, be they Ethernet or jumbo frames."""
FIX = "Give the interfaces on both sides the MTU of the smallest link between them."


def check_packets(peer: PeerToCheck) -> Finding:
    """Of an agent that has answered a small question."""
    try:
        echo = ask(peer, Status(echo=2 * PADDING)).echo
    except RequestTimeout:
        return _which_way(peer)
    except KVBusError as error:
        return finding(peer, "packets", error.message, "It answered before.", LOOK_THERE)
    if echo:
        return finding(peer, "packets", found="packets of full size come there, and back")
    return Finding(
        "peer.packets",
        NOTE,
        "packets of full size come there; the way back was not looked at",
        {"endpoint": peer.endpoint, "error": ""},
        why="The agent is of an earlier version, which does not echo.",
    )


def check_silence(peer: PeerToCheck) -> Iterator[Finding]:
    """Of an agent that told no status, which may not fit into a packet: nothing if it is silent."""
    if not isinstance(answer_or_error(peer, Trace()), KVBusError):
        yield _lost(peer, "the one for its status", "back")


def _which_way(peer: PeerToCheck) -> Finding:
    try:
        ask(peer, Status(fetch_id=PADDING, offer_id=PADDING))
    except RequestTimeout:
        return _lost(peer, f"one of {NUM_BYTES:,} bytes", "there")
    except KVBusError as error:
        return finding(peer, "packets", error.message, "It answered before.", LOOK_THERE)
    return _lost(peer, f"one with an answer of {NUM_BYTES:,} bytes", "back")


def _lost(peer: PeerToCheck, question: str, way: str) -> Finding:
    return finding(
        peer,
        "packets",
        f"small questions are answered, {question} is not: large packets are lost on the way {way}",
        f"{LEADS_TO}peer_unreachable or timeout.",
        FIX,
        command=f"ping -M do -s 1472 {quote(peer.host)}",
    )
