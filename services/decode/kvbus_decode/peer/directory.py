"""The agents that this agent talks to: connections, their events, and their end.

Refuses more peers than the limit while all of them are in use, and agents whose key is not trusted
with their role.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import anyio
import structlog

from kvbus.agent.service import Agent
from kvbus.bus import (
    AllowedPeers,
    EventListener,
    EventSubscriber,
    OnReply,
    RequestClient,
    SocketOptions,
    new_boot_id,
)
from kvbus.errors import ErrorCode, KVBusError, LocalError, PeerLost, RemoteError
from kvbus.protocol.message import R, Request, Role
from kvbus.protocol.ticket import Ticket
from kvbus_decode.config import DecodeConfig

log = structlog.get_logger()

SILENCE_S = 5.0
"""A peer without a heartbeat for so long is logged as silent."""
FORGET_PEER_S = 60.0
"""A peer that answers nothing for so long is left; the next fetch from it connects again."""

REQUESTS_OF_A_FETCH = 8
"""At most so many of one wait for replies of one peer: a claim or renewal, packs, releases."""

SILENT_S, RETRY_S = 5.0, 1.0
"""A peer that was pinged each second and gave no sign of life for so long is silent."""

TOPICS = ("offer.extended", "offer.sealed", "lease.revoked", "lease.expired", "lease.ended")
"""Of an offer that is read, or waited for while another reader has it."""

ENGINE_READY = "engine.ready"
"""Of an agent that is kept warm."""

Extent = tuple[int, int]
"""First and one-past-last address of registered memory."""


class PeerAddress(NamedTuple):
    """Where an agent is, the key that it must have if we have one, and what it must be."""

    endpoint: str
    server_key: str = ""
    role: Role = Role.PREFILL

    @classmethod
    def of(cls, ticket: Ticket) -> "PeerAddress":
        """The prefill agent that a ticket names."""
        return cls(ticket.endpoint, ticket.server_key)


@dataclass(slots=True, eq=False)
class Peer:
    """One agent, by the endpoint in tickets, or by the one that an engine's home names."""

    address: PeerAddress
    client: RequestClient
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    nixl_turn: anyio.Lock = field(default_factory=anyio.Lock)
    events_endpoint: str = ""
    boot: str = ""
    num_reads_elsewhere: int = 0
    """Reads by other agents, as of its last heartbeat."""
    num_users: int = 0
    used_at: float = 0.0
    """When the last fetch from it ended, while there is none."""
    num_refused: int = 0
    """Fetches that were refused because it is silent, since it was last heard."""

    @property
    def endpoint(self) -> str:
        """Where it is, for messages."""
        return self.address.endpoint

    def ask(self, message: Request[R], timeout_s: float, on_reply: OnReply[R]) -> None:
        """Send a request; what keeps it from being sent goes to ``on_reply`` as well."""
        try:
            self.client.send(message, timeout_s=timeout_s, on_reply=on_reply)
        except KVBusError as error:
            on_reply(error)

    @property
    def is_silent(self) -> bool:
        """Whether it is asked for a sign of life in vain."""
        return self.client.silent_s > SILENT_S

    def check_alive(self, boot: str) -> None:
        """Raise `PeerLost` when its process ``boot`` is gone."""
        if self.client.is_gone and self.client.peer_boot == boot:
            raise self.loss()

    def loss(self) -> PeerLost:
        """Why what needs it fails once its process is gone."""
        return PeerLost(f"the agent at {self.endpoint} is gone", endpoint=self.endpoint)


PeerBoot = Callable[[Peer, str], None]
PeerDropped = Callable[[Peer], None]


class PeerDirectory:
    """All peers; who uses one holds it from `acquire` to `release`.

    ``on_boot`` is told a peer's boot id when it is known and when it changes, ``on_gone`` of one
    whose process is gone, ``on_dropped`` of a peer that made room, was not used for long or
    answered nothing for long, ``listener`` gets the events.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        *,
        on_boot: PeerBoot,
        on_gone: PeerBoot,
        on_dropped: PeerDropped,
        listener: EventListener,
    ) -> None:
        self._agent, self._config = agent, config
        self._on_boot, self._on_gone, self._on_dropped = on_boot, on_gone, on_dropped
        self._room = REQUESTS_OF_A_FETCH * config.max_handoffs
        self._peers: dict[PeerAddress, Peer] = {}
        self._by_events: dict[str, Peer] = {}
        self._allowed = AllowedPeers(config.allowed_peers) if config.allowed_peers else None
        self._subscriber = EventSubscriber(
            agent.context,
            listener,
            topics=(*TOPICS, ENGINE_READY),
            silence_s=SILENCE_S,
            max_endpoints=config.max_peers,
            on_fault=_log_fault,
            keys=agent.access.keys,
            options=SocketOptions(allowed=self._allowed),
        )
        agent.access.on_change.append(self._drop_distrusted)
        agent.tasks.start_soon(self._subscriber.run)
        agent.tasks.start_soon(self._drop_unused)

    def __len__(self) -> int:
        return len(self._peers)

    def acquire(self, address: PeerAddress) -> Peer:
        """The peer at ``address``, connected when it is new.

        Raises `LocalError` (``busy``), and `RemoteError` (``forbidden``) for one we may not trust.
        """
        peer = self._peers.pop(address, None) or self._connect(address)
        self._peers[address] = peer  # the latest used is the last to make room
        peer.num_users += 1
        return peer

    def num_reads_elsewhere(self, endpoint: str) -> int:
        """How many reads by other agents are under way there, as far as is known."""
        known = (one for address, one in self._peers.items() if address.endpoint == endpoint)
        return max((one.num_reads_elsewhere for one in known), default=0)

    def find(self, address: PeerAddress) -> Peer | None:
        """The peer at ``address``, if it is known."""
        return self._peers.get(address)

    def check_answers(self, address: PeerAddress, boot: str | None) -> None:
        """Raise `RemoteError` (``peer_unreachable``) for an agent that is silent.

        A fetch would only wait for it; pings find out when it answers again. A ticket of another
        process there, ``boot``, is newer than what is known.
        """
        peer = self._peers.get(address)
        if peer is None:
            return
        if not peer.is_silent or boot not in (None, peer.client.peer_boot):
            peer.num_refused = 0
            return
        peer.num_refused += 1
        raise RemoteError(
            f"the prefill agent at {peer.endpoint} has not answered for "
            f"{peer.client.silent_s:.0f} s; it is asked again and again",
            code=ErrorCode.PEER_UNREACHABLE,
            endpoint=peer.endpoint,
            retry_after_s=RETRY_S,
        )

    def silent(self) -> dict[str, float]:
        """The agents that do not answer, and for how many seconds nothing has come from each."""
        return {one.endpoint: one.client.silent_s for one in self._peers.values() if one.is_silent}

    def key_of_silent(self, endpoint: str) -> str:
        """The key of one of `silent`; empty without keys."""
        known = (one for one in self._peers.values() if one.endpoint == endpoint and one.is_silent)
        return next((one.address.server_key for one in known), "")

    @property
    def num_refused(self) -> int:
        """Fetches that were refused for those, as of `silent`."""
        return sum(one.num_refused for one in self._peers.values() if one.is_silent)

    def release(self, peer: Peer) -> None:
        """One user less."""
        peer.num_users -= 1
        peer.used_at = self._agent.loop.time()

    def listen(self, peer: Peer, events_endpoint: str) -> None:
        """Subscribe to the peer's events, in place of those of its earlier process."""
        if peer.events_endpoint != events_endpoint:
            self._forget_events(peer)
            peer.events_endpoint = events_endpoint
        if self._by_events.get(events_endpoint, peer) is not peer:  # its earlier key was another
            self._subscriber.remove(events_endpoint)
        self._subscriber.add(events_endpoint, server_key=peer.address.server_key)
        self._by_events[events_endpoint] = peer

    def of_events(self, events_endpoint: str) -> Peer | None:
        """The peer whose events are there."""
        return self._by_events.get(events_endpoint)

    def _connect(self, address: PeerAddress) -> Peer:
        options = self._agent.access.connected(*address)
        if len(self._peers) >= self._config.max_peers:
            self._drop_idle()
        client = RequestClient(
            self._agent.context,
            address.endpoint,
            boot=new_boot_id(),  # ids start anew: the server must not know them from an earlier one
            on_boot=lambda boot: self._see_boot(peer, boot),
            on_gone=lambda boot: self._lose(peer, boot),
            on_fault=_log_fault,
            max_pending=self._room,
            options=replace(options, allowed=self._allowed),
        )
        peer = Peer(address, client)
        self._agent.tasks.start_soon(self._run, peer)
        return peer

    async def _run(self, peer: Peer) -> None:
        with peer.scope:
            await peer.client.run()

    async def _drop_unused(self) -> None:
        """Leave peers that nobody reads from: some answer nothing and may have moved."""
        forget_s, idle_s = FORGET_PEER_S, self._config.idle_peer_s
        while True:
            await anyio.sleep(min(forget_s, idle_s) / 4)
            now = self._agent.loop.time()
            for peer in [peer for peer in self._peers.values() if not peer.num_users]:
                silent_s, unused_s = peer.client.silent_s, now - peer.used_at
                if silent_s >= forget_s or unused_s >= idle_s:
                    log.info(
                        "peer.left",
                        peer=peer.endpoint,
                        silent_s=round(silent_s),
                        unused_s=round(unused_s),
                    )
                    self._drop(peer)

    def _drop_idle(self) -> None:
        idle = next((peer for peer in self._peers.values() if not peer.num_users), None)
        if idle is None:
            raise LocalError(
                f"{len(self._peers)} peers are in use, which is the limit (max_peers)",
                code=ErrorCode.BUSY,
            )
        self._drop(idle)

    def _drop(self, peer: Peer) -> None:
        del self._peers[peer.address]
        self._on_dropped(peer)
        self._forget_events(peer)
        peer.scope.cancel()

    def _forget_events(self, peer: Peer) -> None:
        """Unless another peer has taken them over: the same agent under its new key."""
        if self._by_events.get(peer.events_endpoint) is peer:
            self._subscriber.remove(peer.events_endpoint)
            del self._by_events[peer.events_endpoint]

    def _drop_distrusted(self, keys: frozenset[str]) -> None:
        """Agents of these keys are met anew, if they are trusted at all; their fetches fail."""
        for peer in list(self._peers.values()):
            if peer.address.server_key in keys:
                log.info("peer.distrusted", peer=peer.endpoint, key=peer.address.server_key)
                self._drop(peer)

    def _see_boot(self, peer: Peer, boot: str) -> None:
        if self._peers.get(peer.address) is not peer:  # it was dropped just now
            return
        if peer.boot:
            log.warning("peer.restarted", peer=peer.endpoint, peer_boot=boot)
        peer.boot = boot
        self._on_boot(peer, boot)

    def _lose(self, peer: Peer, boot: str) -> None:
        if self._peers.get(peer.address) is peer:
            self._on_gone(peer, boot)


def _log_fault(error: Exception) -> None:
    """A defect in handling one message of one peer; the others go on."""
    log.error("peer.message_failed", exc_info=error)
