"""What the sockets of an agent have seen, for its metrics page.

Refuses to count anything itself: the bus and the attach socket do.
"""

from kvbus.bus import ConnectionGuard, RequestServer
from kvbus.memory.attach import AttachServer

BUS_READINGS = {
    "malformed_messages": "Frames that were no message, on any socket.",
    "bus_busy": "Requests that were refused because too many were pending.",
    "bus_repeats": "Requests that came again and were not done again.",
    "reply_bytes": "Replies that are kept for requests that come again.",
    "peer_pings": "Signs of life that other agents have asked for.",
    "notices_resent": "Notices that an engine did not acknowledge in time.",
    "replies_dropped": "Replies whose peer was gone.",
    "attach_refused": "Connections to the attach socket that were turned away.",
    "connections": "Connections of others to the peer and the events socket.",
    "connections_ended": "Connections to them that were ended, as they were over a bound.",
}


def bus_readings(
    engine: RequestServer, peer: RequestServer, attach: AttachServer, guard: ConnectionGuard
) -> dict[str, float]:
    """The readings named in `BUS_READINGS`, for both request sockets together."""
    servers = (engine.counters, peer.counters)
    refused = attach.counts.num_refused_users + attach.counts.num_refused_busy
    return {
        "malformed_messages": sum(c.malformed for c in servers) + attach.counts.num_malformed,
        "bus_busy": sum(c.busy for c in servers),
        "bus_repeats": sum(c.repeats_answered + c.repeats_absorbed for c in servers),
        "reply_bytes": engine.num_reply_bytes + peer.num_reply_bytes,
        "peer_pings": peer.counters.pings,
        "notices_resent": sum(c.notices_resent for c in servers),
        "replies_dropped": sum(c.replies_dropped for c in servers),
        "attach_refused": refused,
        "connections": guard.num_connections,
        "connections_ended": guard.num_ended.total(),
    }
