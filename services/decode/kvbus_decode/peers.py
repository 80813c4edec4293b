"""The agents that this agent talks to: connections, their events, and their end."""

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
"""A peer that is pinged and gave no sign of life for so long is silent."""
FORGET_PEER_S = 60.0
"""One that is silent for so long, and is not used, is left; the next fetch connects again."""
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


# All that is known of whether a peer is there is its client's: when it was last heard (it is pinged
# when nothing has come for a while), which process answers, and whether its port is closed.
#
#     heard within SILENT_S      it is asked
#     silent                     fetches wait and retry: it may be stopped or cut off for a while;
#                                after REFUSED_S new ones are refused at once
#     its port is closed,        the process is lost: its RemoteAgent is closed, and all that came
#     another boot id            from it (`kvbus_decode.remote_agent`)
#     an answer after that       the process is found: `PeerDirectory.found`
class PeerDirectory(EventListener):
    """All peers; what uses one holds it from `acquire` to `release`.

    ``on_lost`` fails the fetches that read from a process that is lost, and returns how many.
    ``on_found`` is called when a process has answered, or has another engine; with True unless it
    may be known. ``on_offer`` gets the events of offers and leases, and ``on_missed`` the boot id
    of a process when some were missed.
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
        silent_s = {one.address[:2]: one.client.silent_s for one in self._peers.values()}
        return {address: seconds for address, seconds in silent_s.items() if seconds > SILENT_S}

    def refusal_of(self, endpoint: str) -> str:
        """Why the last handshake with an agent there came to nothing; empty if it did not."""
        refusals = (one.refusal for one in self._peers.values() if one.endpoint == endpoint)
        return next(filter(None, refusals), "")

    def found(self, peer: Peer) -> RemoteAgent:
        """Return the process that has just answered: a new one, or one that was taken for lost."""
        remote, boot = peer.remote, peer.client.peer_boot or ""
        if not remote.boot and not remote.closed:
            remote.boot, peer.refusal = boot, ""
            if remote.earlier not in ("", boot):
                log.warning("peer.restarted", peer=peer.endpoint, peer_boot=boot)
            self.on_found(peer, bool(remote.earlier))
        return remote

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
        peer = self._by_events.get(endpoint)
        if peer is None:
            return
        if event.op == ENGINE_READY:
            self.on_found(peer, True)
        elif event.op == ENGINE_LOST:
            ended = event.body
            peer.remote.drop_engine(ended.get("engine_id"), ended.get("engine_instance"))
        else:
            self.on_offer(event)

    def on_heartbeat(self, endpoint: str, boot: str) -> None:
        """It lives: it need not be pinged."""
        if (peer := self._by_events.get(endpoint)) is not None:
            peer.client.note_alive(boot)

    def on_gap(self, endpoint: str, boot: str, topic: str) -> None:
        self.on_missed(boot)

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
                    self.drop(peer, "was left")

    def _drop_idle(self) -> None:
        idle = next((peer for peer in self._peers.values() if not peer.num_users), None)
        if idle is None:
            raise LocalError(
                f"{len(self._peers)} peers are in use, which is the limit (max_peers)",
                code=ErrorCode.BUSY,
            )
        self.drop(idle, "was left")

    def drop(self, peer: Peer, reason: str) -> None:
        """Leave it; what still holds it finds it closed."""
        del self._peers[peer.address]
        peer.remote.close(reason)
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
                self.drop(peer, "is not trusted any more")

    def _see_boot(self, peer: Peer, _: str) -> None:
        if peer.remote.boot:
            peer.remote.close("came back as a new process")
        self.found(peer)

    def _lose(self, remote: RemoteAgent) -> None:
        """A process is closed: what answers from now on is another one."""
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
    """A defect in handling one message of one peer; the others go on."""
    log.error("peer.message_failed", exc_info=error)
