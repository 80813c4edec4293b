"""Connections to the other agents, and their events."""

from collections.abc import Callable
from dataclasses import replace

import anyio
import structlog

from kvbus.agent.service import Agent
from kvbus.bus import (
    AllowedPeers,
    EventListener,
    EventSubscriber,
    RequestClient,
    SocketOptions,
    new_boot_id,
)
from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.envelope import Notice
from kvbus_decode.config import DecodeConfig
from kvbus_decode.nixl_peers import NixlPeers
from kvbus_decode.remote_agent import Peer, PeerAddress, RemoteAgent

log = structlog.get_logger()

SILENT_S = 5.0
"""A pinged peer that has sent nothing for this long is silent."""
FORGET_PEER_S = 60.0
"""An unused peer is dropped after this silence."""
REQUESTS_OF_A_FETCH = 8

ENGINE_READY, ENGINE_LOST = "engine.ready", "engine.lost"
TOPICS = (
    "offer.extended",
    "offer.sealed",
    "offer.parked",
    "lease.revoked",
    "lease.expired",
    "lease.ended",
    ENGINE_READY,
    ENGINE_LOST,
)


# Only the peer's client decides whether the peer is alive. It knows the time of the last message
# (it pings after a silence), the process that replies, and whether the port is closed.
#
#     a message within           requests are sent
#     SILENT_S
#     silent                     fetches wait and retry: the peer may be paused or cut off. After
#                                REFUSED_S new fetches are refused immediately
#     its port is closed,        the process is lost: its RemoteAgent is closed, and everything
#     another boot id            that came from it (`kvbus_decode.remote_agent`)
#     a reply after that         the process is found: `PeerDirectory.found`
class PeerDirectory(EventListener):
    """All peers.

    ``on_found`` gets True for a later process or engine of an address. ``on_missed`` gets a boot id
    after a gap in its events.
    """

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self.on_lost: Callable[[RemoteAgent], int] = lambda _: 0
        self.on_found: Callable[[Peer, bool], object] = lambda *_: None
        self.on_offer: Callable[[Notice], object] = lambda _: None
        self.on_missed: Callable[[str], object] = lambda _: None
        self._nixl = NixlPeers(agent.data)
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
        agent.access.on_change.append(self._remove_distrusted)
        agent.tasks.start_soon(self._subscriber.run)
        agent.tasks.start_soon(self._remove_unused)

    def __len__(self) -> int:
        return len(self._peers)

    def acquire(self, address: PeerAddress) -> Peer:
        """Return the peer, connecting to a new one.

        Raises `LocalError` (``busy``) or `RemoteError` (``forbidden``).
        """
        peer = self._peers.pop(address, None) or self._connect(address)
        self._peers[address] = peer  # most recently used last: `_remove_idle` evicts the first
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
        """Return seconds of silence by endpoint and key."""
        silent_s = {one.address[:2]: one.client.silent_s for one in self._peers.values()}
        return {address: seconds for address, seconds in silent_s.items() if seconds > SILENT_S}

    def refusal_of(self, endpoint: str) -> str:
        refusals = (one.refusal for one in self._peers.values() if one.endpoint == endpoint)
        return next(filter(None, refusals), "")

    def found(self, peer: Peer) -> RemoteAgent:
        remote, boot = peer.remote, peer.client.peer_boot or ""
        if not remote.boot and not remote.closed:
            remote.boot, peer.refusal = boot, ""
            if remote.earlier not in ("", boot):
                log.warning("peer.restarted", peer=peer.endpoint, peer_boot=boot)
            self.on_found(peer, bool(remote.earlier))
        return remote

    def listen(self, peer: Peer, events_endpoint: str) -> None:
        if peer.events_endpoint != events_endpoint:
            self._unsubscribe(peer)
            peer.events_endpoint = events_endpoint
        if self._by_events.get(events_endpoint, peer) is not peer:  # it had another key before
            self._subscriber.remove(events_endpoint)
        self._subscriber.add(events_endpoint, server_key=peer.address.server_key)
        self._by_events[events_endpoint] = peer

    def on_event(self, endpoint: str, event: Notice) -> None:
        peer = self._by_events.get(endpoint)
        if peer is None:
            return
        if event.op == ENGINE_READY:
            self.on_found(peer, True)
        elif event.op == ENGINE_LOST:
            ended = event.body
            peer.remote.remove_engine(ended.get("engine_id"), ended.get("engine_instance"))
        else:
            self.on_offer(event)

    def on_heartbeat(self, endpoint: str, boot: str) -> None:
        if (peer := self._by_events.get(endpoint)) is not None:
            peer.client.note_alive(boot)

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        self.on_missed(boot)

    def _connect(self, address: PeerAddress) -> Peer:
        options = self._agent.access.connected(*address)
        if len(self._peers) >= self._config.max_peers:
            self._remove_idle()
        endpoint = address.endpoint
        client = RequestClient(
            self._agent.context,
            endpoint,
            boot=new_boot_id(),  # request ids start at the same number again
            on_boot=lambda boot: self._see_boot(peer, boot),
            on_gone=lambda _: peer.remote.close("is gone"),
            on_moved=lambda address: log.info("peer.moved", peer=endpoint, address=address),
            on_fault=_log_fault,
            max_pending=REQUESTS_OF_A_FETCH * self._config.max_handoffs,
            options=replace(options, allowed=self._allowed),
        )
        peer = Peer(address, client, self._nixl, self._lose)
        self._agent.tasks.start_soon(self._run, peer)
        return peer

    async def _run(self, peer: Peer) -> None:
        with peer.scope:
            await peer.client.run()

    async def _remove_unused(self) -> None:
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
                    self.remove(peer, "was left")

    def _remove_idle(self) -> None:
        idle = next((peer for peer in self._peers.values() if not peer.num_users), None)
        if idle is None:
            raise LocalError(
                f"{len(self._peers)} peers are in use, which is the limit (max_peers)",
                code=ErrorCode.BUSY,
            )
        self.remove(idle, "was left")

    def remove(self, peer: Peer, reason: str) -> None:
        del self._peers[peer.address]
        peer.remote.close(reason)
        self._unsubscribe(peer)
        peer.scope.cancel()

    def _unsubscribe(self, peer: Peer) -> None:
        """Unsubscribe, unless the same agent under a new key has taken over."""
        if self._by_events.get(peer.events_endpoint) is peer:
            self._subscriber.remove(peer.events_endpoint)
            del self._by_events[peer.events_endpoint]

    def _remove_distrusted(self, keys: frozenset[str]) -> None:
        for peer in list(self._peers.values()):
            if peer.address.server_key in keys:
                log.info("peer.distrusted", peer=peer.endpoint, key=peer.address.server_key)
                self.remove(peer, "is not trusted any more")

    def _see_boot(self, peer: Peer, _: str) -> None:
        if peer.remote.boot:
            peer.remote.close("restarted")
        self.found(peer)

    def _lose(self, remote: RemoteAgent) -> None:
        peer = remote.peer
        if self.has(peer):
            peer.remote = RemoteAgent(peer, remote.boot or remote.earlier)
        num_fetches = self.on_lost(remote)
        level = log.warning if num_fetches else log.info
        level(
            "peer.lost",
            peer=peer.endpoint,
            peer_boot=remote.boot,
            reason=remote.closed,
            num_fetches=num_fetches,
        )


def _log_fault(error: Exception) -> None:
    log.error("peer.message_failed", exc_info=error)
