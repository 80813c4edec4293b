"""Configuration keys of a decode agent."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvbus.agent.config import AgentConfig, Bound, Duration
from kvbus_decode.fetch.entry import FetchLimits
from kvbus_decode.read_table import ReadLimits

LISTING = r"^tcp://[^\s/;,]+:[0-9]{1,5}( [!-~]{40})?$"
EXPECTED = "tcp://HOST:PORT for each, and behind a space the agent's public key if it has one"
Listing = Annotated[str, Meta(pattern=LISTING, max_length=300, extra={"expected": EXPECTED})]

COMMIT_GRACE_S = 1.0
SAMPLED_ONE_IN = 64
TILES_IN_FLIGHT = 3


class DecodeConfig(AgentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `kvbus-decode`; every key but three has a default."""

    called: ClassVar[str] = "a decode agent"

    fetch_timeout_s: Duration = 60.0
    """Default deadline of a fetch."""
    fetches_at_once: Bound = 32
    """Most fetches that start before one of them ends or stalls. The others wait in order, without
    leases."""
    lease_s: Duration = 10.0
    """Requested duration of a lease; renewed after a third of it."""
    request_timeout_s: Duration = 5.0
    """Time after which a prefill agent without a reply to a handshake or an acquire counts as
    unreachable."""
    allowed_peers: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    """Addresses that this agent may connect to, such as `10.0.0.7`, `10.1.0.0/16:7701-7702` or
    `[fd00::/8]:7000-7999`. Names are resolved before the comparison. Empty: any address from a
    ticket or another agent."""
    peers: Annotated[tuple[Listing, ...], Meta(max_length=1024)] = ()
    """Prefill agents to connect to, and to shake hands with, before the first fetch from them. Each
    is `tcp://HOST:PORT`, with keys `tcp://HOST:PORT KEY`. They must allow it (shake_hands_ahead).
    """
    max_peers: Bound = 256
    """Most prefill agents at a time; idle ones make room. Holds connect to half as many at most."""
    idle_peer_s: Duration = 600.0
    """Time without a read after which a prefill agent is disconnected, and its resources are freed.
    """
    quarantine_timeout_s: Duration = 10.0
    """Wait for aborted READs if their prefill agent is stopped or cut off. Then the agent replaces
    its data process; other READs fail and are retried."""

    path: Literal["auto", "direct", "staged", "packed", "mapped"] = "auto"
    """Path of KV. `direct`: from blocks into blocks. `staged`: through staging slots here.
    `packed`: through slots on both sides. `mapped`: a copy from a prefill engine's memory on this
    machine. `auto`: the agent chooses."""
    digest: Literal["off", "sampled", "full"] = "off"
    """Whether to compare digests of the bytes read with those of the prefill engine before a fetch
    completes: `full` for all, `sampled` for a 64th. If they differ, the fetch fails with
    `digest_mismatch`."""

    def problems(self) -> Iterator[tuple[str, str]]:
        if len(self.peers) > self.max_peers:
            yield (
                "peers",
                f"lists {len(self.peers)} agents, which stay connected, and max_peers = "
                f"{self.max_peers} is less; raise max_peers to {len(self.peers)} or more, or list "
                "fewer",
            )

    @property
    def fetch_limits(self) -> FetchLimits:
        return FetchLimits(
            max_fetches=self.max_handoffs,
            num_places=self.fetches_at_once,
            lease_s=self.lease_s,
            request_timeout_s=self.request_timeout_s,
            commit_grace_s=COMMIT_GRACE_S,
            max_retired_bytes=self.max_ended_bytes,
        )

    @property
    def digest_one_in(self) -> int:
        return {"off": 0, "sampled": SAMPLED_ONE_IN, "full": 1}[self.digest]

    def read_limits(self, *, num_slots: int) -> ReadLimits:
        return ReadLimits(
            transfers_in_flight=TILES_IN_FLIGHT,
            num_slots=num_slots,
            quarantine_s=self.quarantine_timeout_s,
        )
