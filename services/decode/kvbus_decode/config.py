"""The keys of a decode agent's configuration; `kvbus.agent.config` reads and checks."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from kvbus.agent.config import AgentConfig, Bound, Duration
from kvbus_decode.fetch.entry import FetchLimits
from kvbus_decode.read_table import ReadLimits

LISTING = r"^tcp://[^\s/;,]+:[0-9]{1,5}( [!-~]{40})?$"
WORDS = "tcp://HOST:PORT for each, and behind a space the agent's public key if it has one"
Listing = Annotated[str, Meta(pattern=LISTING, max_length=300, extra={"words": WORDS})]
"""Where a prefill agent is, and its public key."""

TAKE_GRACE_S = 1.0
"""The answer to a take that was asked by the deadline of its fetch counts so much longer.

A yes has ended the offer, and the fetch completes so much late.
"""
SAMPLED_ONE_IN = 64
BOXES_IN_FLIGHT = 3
"""Most packed boxes of one fetch that are on their way."""


class DecodeConfig(AgentConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Configuration of `kvbus-decode`; every key but three has a default."""

    called: ClassVar[str] = "a decode agent"

    fetch_timeout_s: Duration = 60.0
    """Deadline of a fetch, when not told otherwise."""
    fetches_at_once: Bound = 32
    """Most fetches that begin before one of them ends or stalls; the others wait in order, without
    leases.
    """
    lease_s: Duration = 10.0
    """Lease that is asked for; renewed after a third of it."""
    request_timeout_s: Duration = 5.0
    """A prefill agent that does not answer a handshake or a claim for so long is not there."""
    allowed_peers: Annotated[tuple[str, ...], Meta(max_length=1024)] = ()
    """Addresses that agents are connected to, as `10.0.0.7`, `10.1.0.0/16:7701-7702` or
    `[fd00::/8]:7000-7999`, compared after names are resolved. Empty: any that a ticket or another
    agent names.
    """
    peers: Annotated[tuple[Listing, ...], Meta(max_length=1024)] = ()
    """Prefill agents to connect to, and to shake hands with, before the first fetch from them: each
    `tcp://HOST:PORT`, with keys `tcp://HOST:PORT KEY`. They have to allow it (shake_hands_ahead).
    """
    max_peers: Bound = 256
    """Most prefill agents at a time; idle ones make room."""
    idle_peer_s: Duration = 600.0
    """A prefill agent that nothing was read from for so long is left, with all that is held for it.
    """
    quarantine_timeout_s: Duration = 10.0
    """How long the agent waits for READs that were aborted, if their prefill agent is stopped or
    cut off. Then it replaces the data process. That fails other READs, which are repeated.
    """

    path: Literal["auto", "direct", "staged", "packed", "mapped"] = "auto"
    """How KV is read: `direct` from blocks into blocks, `staged` through staging slots here,
    `packed` through slots on both sides, `mapped` by a copy out of a prefill engine's memory on
    this machine; `auto` chooses.
    """
    digest: Literal["off", "sampled", "full"] = "off"
    """Whether what was read is compared with what the prefill engine has, by digests, before a
    fetch completes: all of it, or a 64th. Bytes that differ fail it with `digest_mismatch`.
    """

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
            take_grace_s=TAKE_GRACE_S,
            max_retired_bytes=self.max_ended_bytes,
        )

    @property
    def digest_one_in(self) -> int:
        """One of so many pieces is compared; 0: none."""
        return {"off": 0, "sampled": SAMPLED_ONE_IN, "full": 1}[self.digest]

    def read_limits(self, *, num_slots: int) -> ReadLimits:
        return ReadLimits(
            legs_in_flight=BOXES_IN_FLIGHT,
            num_slots=num_slots,
            quarantine_s=self.quarantine_timeout_s,
        )
