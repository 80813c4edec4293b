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
    """Most fetches that run at a time, stalled ones not counted. Others wait in order, without
    leases."""
    lease_s: Duration = 10.0
    """Requested lease; renewed after a third of it."""
    request_timeout_s: Duration = 5.0
    """Time without a reply to a handshake or an acquire after which a prefill agent counts as
    unreachable."""
    allowed_peers: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    """Addresses that this agent may connect to, such as `10.0.0.7`, `10.1.0.0/16:7701-7702` or
    `[fd00::/8]:7000-7999`; names are resolved first. Empty: any."""
    peers: Annotated[tuple[Listing, ...], Meta(max_length=1024)] = ()
    """Prefill agents to connect to and shake hands with at startup: `tcp://HOST:PORT`, with keys
    `tcp://HOST:PORT KEY`. They must allow it (shake_hands_ahead)."""
    max_peers: Bound = 256
    """Most prefill agents at a time; idle ones make room. Holds connect to half at most."""
    idle_peer_s: Duration = 600.0
    """Time without a read after which a prefill agent is disconnected."""
    quarantine_timeout_s: Duration = 10.0
    """Wait for aborted READs of a stopped or unreachable prefill agent. Then the data process is
    replaced; other READs are retried."""

    path: Literal["auto", "direct", "staged", "packed", "mapped"] = "auto"
    """Path of KV. `direct`: blocks to blocks. `staged`: through slots here. `packed`: through slots
    on both sides. `mapped`: a copy on this machine. `auto`: the agent chooses."""
    digest: Literal["off", "sampled", "full"] = "off"
    """Whether to compare digests of the bytes read with the prefill engine's: `full` for all,
    `sampled` for a 64th. A difference fails the fetch: `digest_mismatch`."""

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
