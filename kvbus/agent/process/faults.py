"""What is wrong at an agent now, and what to do about it: for its page, and for `kvbus top`.

Refuses to look at anything itself: it reads what an agent says of itself.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from shlex import quote

from kvbus.protocol.live import Fault
from kvbus.protocol.peer import AgentStatus
from kvbus.protocol.trace import Span

ADVICE = {
    "peer_unreachable": "See that the prefill agent runs, and that its advertise_host and port are "
    "reached from here: kvbus doctor --peer.",
    "stale": "The prefill side was restarted: route these requests again.",
    "lease_expired": "See to the lag and the log of the prefill agent; it may be stopped.",
    "timeout": "See to the lag and the log of the prefill agent; where no bytes come at all, run "
    "kvbus doctor --peer here.",
    "peer_lost": "The prefill agent died: start it, and route these requests again.",
    "engine_lost": "The prefill engine died or left: route these requests again.",
    "transfer_failed": "See to the network of data_interfaces and to UCX: kvbus doctor --peer.",
    "digest_mismatch": "Bytes were changed on the way: test the memory and the NICs of both sides.",
    "forbidden": "A key or a ticket is not trusted: compare kvbus keys show on both sides.",
    "offer_expired": "The decode side comes too late: see to its queue, or raise offer_ttl_s.",
    "incompatible": "The two engines cannot exchange KV: make equal what the reason names.",
    "busy": "A bound was reached: raise it, or send less.",
    "draining": "The agent is stopping: use another one.",
}
OTHERWISE = "The log of both agents has the reason; kvbus trace ID shows where it happened."
NOBODYS = ("cancelled", "offer_withdrawn", "abandoned")
"""Codes of requests that were not wanted any more."""
OLD_S = 600.0
"""What was last wrong before that is no fault of now."""


def current_faults(
    status: AgentStatus,
    metrics: Mapping[str, float],
    recent: Sequence[Sequence[Span]],
    *,
    now_s: float,
    wall_s: float,
    is_linked: bool,
    key_options: Mapping[str, str],
) -> Iterator[Fault]:
    """Those of peers and of memory now, then those of the last minutes.

    ``recent`` has the spans of each of the last handoffs; ``now_s`` is on their clock, ``wall_s``
    are the seconds since 1970. ``is_linked`` says whether an interface of the agent has a link.
    ``key_options`` are what a command needs to ask a peer, by its endpoint.
    """
    refused = _refused(len(status.silent_peers), metrics.get("kvbus_silent_peer_refusals", 0.0))
    for endpoint, wait_s in status.silent_peers.items():
        options = key_options.get(endpoint, "")
        peer = f"--peer {quote(endpoint)}"
        look = f"--only peer {peer}{options}" if options else peer
        yield Fault(
            f"the agent at {endpoint} does not answer{refused}; it is tried again "
            f"{retry_time(wait_s)}",
            f"See that it runs and is not stopped, then run here: kvbus doctor {look}",
        )
    if blocks := metrics.get("kvbus_quarantined_blocks"):
        yield Fault(
            f"{blocks:.0f} blocks are withheld, as a transfer can still write into them",
            "A prefill agent is stopped or cut off: let it go on, or end it; else they come back "
            "after quarantine_timeout_s."
            if is_linked
            else "This agent itself is cut off: they come back with the link.",
        )
    ago_s = wall_s - metrics.get("kvbus_recycled_timestamp_seconds", 0.0)
    if ago_s < OLD_S:
        times = metrics.get("kvbus_recycled_transports", 1.0)
        yield Fault(
            "transfers never ended, and NIXL was made anew, "
            f"last {_age(ago_s)} ago ({times:.0f} times since the start)",
            "See to the network between the agents, and to agents that were stopped (SIGSTOP) "
            "or cut off.",
        )
    yield from _failures([entry[0] for entry in recent if entry], now_s)


def retry_time(wait_s: float) -> str:
    """When an agent that does not answer is tried again."""
    return f"in {math.ceil(wait_s)} s" if wait_s > 0 else "at the next fetch"


def _refused(num_silent: int, num_refused: float) -> str:
    """How many fetches that cost; of several agents only the sum is known."""
    if not num_refused:
        return ""
    whom = "it" if num_silent == 1 else f"{num_silent} such agents"
    return f", and {num_refused:.0f} fetches were refused for {whom}"


def _failures(handoffs: Sequence[Span], now_s: float) -> Iterator[Fault]:
    """One for each code, the most frequent first; the error of a handoff is CODE: MESSAGE."""
    by_code: dict[str, list[Span]] = {}
    for one in handoffs:
        if one.error:
            by_code.setdefault(one.error.partition(":")[0], []).append(one)
    for code, failed in sorted(by_code.items(), key=lambda item: -len(item[1])):
        last = max(failed, key=_ended_at)
        ago_s = now_s - _ended_at(last)
        if code not in NOBODYS and ago_s < OLD_S:
            yield Fault(
                f"{len(failed)} of the last {len(handoffs)} handoffs failed, "
                f"last {_age(ago_s)} ago, with {last.error}",
                ADVICE.get(code, OTHERWISE),
            )


def _ended_at(span: Span) -> float:
    return span.start_s if span.end_s is None else span.end_s


def _age(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s" if seconds < 60 else f"{seconds / 60:.0f} min"
