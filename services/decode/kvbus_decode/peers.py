"""The agents that this agent talks to: connections, their health and events, and their end."""

from collections.abc import Iterable
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
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import R, Request, Role
from kvbus.protocol.peer import CancelRequest
from kvbus.protocol.ticket import Ticket
from kvbus_decode.config import DecodeConfig

log = structlog.get_logger()

SILENT_S, RETRY_S = 5.0, 1.0
"""A peer that is pinged and gave no sign of life for so long is silent."""
REFUSED_S = 30.0
"""Fetches from an agent that was silent for this long are refused at once."""
FORGET_PEER_S = 60.0
"""One that is silent for so long, and is not used, is left; the next fetch connects again."""
CANCEL_TIMEOUT_S = 5.0
REQUESTS_OF_A_FETCH = 8
"""At most so many of one wait for replies of one peer: a claim or renewal, packs, releases."""

ENGINE_READY, ENGINE_LOST = "engine.ready", "engine.lost"
TOPICS = (
    "offer.extended",
    "offer.sealed",
    "lease.revoked",
    "lease.expired",
    "lease.ended",
    ENGINE_READY,
    ENGINE_LOST,
)
"""Of an offer that is read, or waited for while another reader has it; and of engines."""

Extent = tuple[int, int]
"""First and one-past-last address of registered memory."""


class PeerAddress(NamedTuple):
    """Where an agent is, the key that it must have if we have one, and what it must be."""

    endpoint: str
    server_key: str = ""
    role: Role = Role.PREFILL

    @classmethod
    def of(cls, ticket: Ticket) -> "PeerAddress":
        return cls(ticket.endpoint, ticket.server_key)


# All that is known of whether a peer is there is its client's: when it was last heard (it is pinged
# when nothing has come for a while), which process answers, and whether its port is closed.
#
#     heard within SILENT_S      it is asked
#     silent                     fetches wait and retry: it may be stopped or cut off for a while;
#                                after REFUSED_S new ones are refused at once
#     its port is closed         that process is gone, and what was read from it: `on_gone`
#     another boot id            so is the process before: `on_boot`
@dataclass(slots=True, eq=False)
class Peer:
    """One agent, by the endpoint in tickets, or by the one that an engine's home names."""

    address: PeerAddress
    client: RequestClient
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    nixl_turn: anyio.Lock = field(default_factory=anyio.Lock)
    events_endpoint: str = ""
    boot: str = ""
    refusal: str = ""
    """Why the last handshake with this process came to nothing."""
    num_users: int = 0
    used_at: float = 0.0
    """When the last fetch from it ended, while there is none."""
    is_refused: bool = False
    """Whether fetches from it were refused because it is silent, since it was last heard."""

    @property
    def endpoint(self) -> str:
        return self.address.endpoint

    @property
    def is_silent(self) -> bool:
        """Whether it has answered no ping for a while."""
        return self.client.silent_s > SILENT_S

    def ask(self, message: Request[R], timeout_s: float, on_reply: OnReply[R]) -> int | None:
        """Send a request and return its id; what prevents that goes to ``on_reply`` as well."""
        try:
            return self.client.send(message, timeout_s=timeout_s, on_reply=on_reply)
        except KVBusError as error:
            on_reply(error)
            return None

    def cancel(self, request_id: int) -> None:
        """Wait no longer for a reply, and have the agent free what the request holds."""
        self.client.take_back(request_id)
        self.ask(CancelRequest(request_id), CANCEL_TIMEOUT_S, lambda _: None)

    def loss(self) -> PeerLost:
        """Why what needs it fails once its process is gone."""
        return PeerLost(f"the agent at {self.endpoint} is gone", endpoint=self.endpoint)


class PeerWatcher:
    """What becomes of peers; override what is of interest."""

    def on_boot(self, peer: Peer, boot: str, earlier: str) -> None:
        """Its process became known, or is another than the ``earlier`` one."""

    def on_gone(self, peer: Peer, boot: str) -> None:
        """Its process is gone; the next one may be there already."""

    def on_dropped(self, peer: Peer) -> None:
        """It was left, or made room, or is not trusted any more: there is no connection."""

    def on_event(self, peer: Peer, event: Notice) -> None:
        """It has published something of `TOPICS`."""

    def on_gap(self, boot: str) -> None:
        """Events of this process were missed."""


class PeerDirectory(EventListener):
    """All peers; what uses one holds it from `acquire` to `release`.

    ``watchers``, set before the first is acquired, are told what becomes of them, in their order.
    """

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self.watchers: Iterable[PeerWatcher] = ()
        self._peers: dict[PeerAddress, Peer] = {}
        self._by_events: dict[str, Peer] = {}
        self._allowed = AllowedPeers(config.allowed_peers) if config.allowed_peers else None
        self._subscriber = EventSubscriber(
            agent.context,
            self,
            topics=TOPICS,
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

    def release(self, peer: Peer) -> None:
        peer.num_users -= 1
        peer.used_at = self._agent.loop.time()

    def find(self, address: PeerAddress) -> Peer | None:
        return self._peers.get(address)

    def has(self, peer: Peer) -> bool:
        return self._peers.get(peer.address) is peer

    def silent(self) -> dict[tuple[str, str], float]:
        """Endpoint and key of those that do not answer, and since how many seconds."""
        silent = (one for one in self._peers.values() if one.is_silent)
        return {one.address[:2]: one.client.silent_s for one in silent}

    def refusal_of(self, endpoint: str) -> str:
        """Why the last handshake with an agent there came to nothing; empty if it did not."""
        refusals = (one.refusal for one in self._peers.values() if one.endpoint == endpoint)
        return next(filter(None, refusals), "")

    def check_answers(self, address: PeerAddress, boot: str | None) -> None:
        """Raise `RemoteError` (``peer_unreachable``) for an agent that was silent for `REFUSED_S`.

        Fetches wait for an agent that may be restarting. After that, only pings find out when it
        answers again. A ticket of another process there, ``boot``, is newer than what is known.
        """
        peer = self._peers.get(address)
        if peer is None:
            return
        is_new = boot not in (None, peer.client.peer_boot)
        if is_new:
            peer.client.look_again()
        if peer.client.silent_s <= REFUSED_S or is_new:
            if peer.is_refused:
                log.info("peer.alive", peer=peer.endpoint)
            peer.is_refused = False
            return
        if not peer.is_refused:
            log.warning("peer.silent", peer=peer.endpoint, peer_boot=peer.boot)
        peer.is_refused = True
        raise RemoteError(
            f"the prefill agent at {peer.endpoint} has not answered for "
            f"{peer.client.silent_s:.0f} s; it is asked again and again",
            code=ErrorCode.PEER_UNREACHABLE,
            endpoint=peer.endpoint,
            retry_after_s=RETRY_S,
        )

    def listen(self, peer: Peer, events_endpoint: str) -> None:
        """Subscribe to the peer's events, in place of those of its earlier process."""
        if peer.events_endpoint != events_endpoint:
            self._forget_events(peer)
            peer.events_endpoint = events_endpoint
        if self._by_events.get(events_endpoint, peer) is not peer:  # its earlier key was another
            self._subscriber.remove(events_endpoint)
        self._subscriber.add(events_endpoint, server_key=peer.address.server_key)
        self._by_events[events_endpoint] = peer

    def on_event(self, endpoint: str, event: Notice) -> None:
        """As `EventListener`; so are the others."""
        if (peer := self._by_events.get(endpoint)) is not None:
            for watcher in self.watchers:
                watcher.on_event(peer, event)

    def on_heartbeat(self, endpoint: str, boot: str) -> None:
        """It lives: it need not be pinged."""
        if (peer := self._by_events.get(endpoint)) is not None:
            peer.client.note_alive(boot)

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        for watcher in self.watchers:
            watcher.on_gap(boot)

    def _connect(self, address: PeerAddress) -> Peer:
        options = self._agent.access.connected(*address)
        if len(self._peers) >= self._config.max_peers:
            self._drop_idle()
        endpoint = address.endpoint
        client = RequestClient(
            self._agent.context,
            endpoint,
            boot=new_boot_id(),  # ids start again: an earlier one has used them
            on_boot=lambda boot: self._see_boot(peer, boot),
            on_gone=lambda boot: self._see_gone(peer, boot),
            on_moved=lambda address: log.info("peer.moved", peer=endpoint, address=address),
            on_fault=_log_fault,
            max_pending=REQUESTS_OF_A_FETCH * self._config.max_handoffs,
            options=replace(options, allowed=self._allowed),
        )
        peer = Peer(address, client)
        self._agent.tasks.start_soon(self._run, peer)
        return peer

    async def _run(self, peer: Peer) -> None:
        with peer.scope:
            await peer.client.run()

    async def _drop_unused(self) -> None:
        idle_s = self._config.idle_peer_s
        while True:
            await anyio.sleep(min(FORGET_PEER_S, idle_s) / 4)
            now = self._agent.loop.time()
            for peer in [one for one in self._peers.values() if not one.num_users]:
                silent_s, unused_s = peer.client.silent_s, now - peer.used_at
                if silent_s >= FORGET_PEER_S or unused_s >= idle_s:
                    log.info(
                        "peer.left",
                        peer=peer.endpoint,
                        silent_s=round(silent_s),
                        unused_s=round(unused_s),
                    )
                    self.drop(peer)

    def _drop_idle(self) -> None:
        idle = next((peer for peer in self._peers.values() if not peer.num_users), None)
        if idle is None:
            raise LocalError(
                f"{len(self._peers)} peers are in use, which is the limit (max_peers)",
                code=ErrorCode.BUSY,
            )
        self.drop(idle)

    def drop(self, peer: Peer) -> None:
        """Leave it; what still holds it finds it closed."""
        del self._peers[peer.address]
        for watcher in self.watchers:
            watcher.on_dropped(peer)
        self._forget_events(peer)
        peer.scope.cancel()

    def _forget_events(self, peer: Peer) -> None:
        """Unless another peer has taken them over: the same agent under its new key."""
        if self._by_events.get(peer.events_endpoint) is peer:
            self._subscriber.remove(peer.events_endpoint)
            del self._by_events[peer.events_endpoint]

    def _drop_distrusted(self, keys: frozenset[str]) -> None:
        """Agents of these keys are met again, if they are trusted at all; their fetches fail."""
        for peer in list(self._peers.values()):
            if peer.address.server_key in keys:
                log.info("peer.distrusted", peer=peer.endpoint, key=peer.address.server_key)
                self.drop(peer)

    def _see_boot(self, peer: Peer, boot: str) -> None:
        if not self.has(peer):
            return
        if peer.boot:
            log.warning("peer.restarted", peer=peer.endpoint, peer_boot=boot)
        earlier, peer.boot, peer.refusal = peer.boot, boot, ""
        for watcher in self.watchers:
            watcher.on_boot(peer, boot, earlier)

    def _see_gone(self, peer: Peer, boot: str) -> None:
        if self.has(peer):
            for watcher in self.watchers:
                watcher.on_gone(peer, boot)


def _log_fault(error: Exception) -> None:
    """A defect in handling one message of one peer; the others go on."""
    log.error("peer.message_failed", exc_info=error)
