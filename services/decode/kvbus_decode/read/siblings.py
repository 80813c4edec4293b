"""Asks the agents that have other ranks of our engine to read their part of each piece.

Refuses to call a sibling's reading over before the sibling says so, or is another process: until
then it may still write into the engine's memory.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable

from kvbus.agent.engines.local_engine import LocalEngine, engine_lost
from kvbus.agent.process.service import Agent
from kvbus.errors import KVBusError, RequestTimeout
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.message import Empty
from kvbus.protocol.remote_ranks import AbortDelegate, Delegate, Delegated
from kvbus_decode.active import ActiveFetch
from kvbus_decode.fetch import events as ev
from kvbus_decode.peer.directory import Peer, PeerDirectory
from kvbus_decode.read.piece import PieceRead

UNTIL_ENDED_S = 86_400.0
ABORT_TIMEOUT_S = 5.0


class Siblings:
    """The asking side, for the fetches of an engine whose home is here."""

    def __init__(self, agent: Agent, peers: PeerDirectory) -> None:
        self._agent, self._peers = agent, peers
        self._asked: dict[LocalEngine, set[_Asked]] = defaultdict(set)

    def start(self, work: ActiveFetch, command: ev.StartRead, read: PieceRead) -> None:
        """Have each sibling read the piece into its ranks; each is a part of ``read``."""
        for other in work.engine.others:
            if read.stopped:
                return
            try:
                self._ask(work, command, other, read)
            except KVBusError as error:
                read.fail(error)

    def forget(self, engine: LocalEngine) -> None:
        """The engine is gone: its ranks elsewhere are no reason to keep those that are here."""
        error = engine_lost()
        for asked in list(self._asked.get(engine, ())):
            asked.on_reply(error)

    def _ask(
        self, work: ActiveFetch, command: ev.StartRead, other: AgentRanks, read: PieceRead
    ) -> None:
        peer = self._peers.acquire(other.endpoint)
        left_s = read.piece.deadline - self._agent.loop.time()
        message = _assist(work, command, other, read, timeout_s=max(1e-3, left_s))

        def on_end() -> None:
            self._asked[work.engine].discard(asked)
            if not self._asked[work.engine]:
                del self._asked[work.engine]
            self._peers.release(peer)

        asked = _Asked(read, peer, work.fetch_id, on_end)
        try:
            peer.client.send(message, timeout_s=UNTIL_ENDED_S, on_reply=asked.on_reply)
        except KVBusError:
            self._peers.release(peer)
            raise
        self._asked[work.engine].add(asked)
        asked.begin()


class _Asked:
    """The part of a piece that one sibling reads."""

    def __init__(
        self, read: PieceRead, peer: Peer, fetch_id: str, on_end: Callable[[], None]
    ) -> None:
        self._read, self._peer, self._fetch_id, self._on_end = read, peer, fetch_id, on_end
        self._untrack: Callable[[], None] | None = None
        self._ended = False

    def begin(self) -> None:
        """It was asked."""
        self._read.begin()
        self._untrack = self._read.on_stop(self._abort)

    def on_reply(self, outcome: Delegated | KVBusError) -> None:
        """It has ended; so it has when the sibling came back as a new process: that writes no more.

        What comes after that changes nothing.
        """
        if self._ended:
            return
        self._ended = True
        if self._untrack is not None:
            self._untrack()
        self._on_end()
        if isinstance(outcome, KVBusError):
            self._read.end(0, outcome)
        else:
            self._read.path = self._read.path or outcome.path
            self._read.end(outcome.num_bytes)

    def _abort(self) -> None:
        """Ask the sibling to stop, again and again until it says that it has."""

        def on_reply(outcome: Empty | KVBusError) -> None:
            if isinstance(outcome, RequestTimeout) and not self._ended:
                self._abort()

        message = AbortDelegate(fetch_id=self._fetch_id)
        with contextlib.suppress(KVBusError):  # then the sibling stops at the deadline
            self._peer.client.send(message, timeout_s=ABORT_TIMEOUT_S, on_reply=on_reply)


def _assist(
    work: ActiveFetch,
    command: ev.StartRead,
    other: AgentRanks,
    read: PieceRead,
    *,
    timeout_s: float,
) -> Delegate:
    requested = work.requested
    return Delegate(
        fetch_id=work.fetch_id,
        engine_id=work.engine.engine_id,
        ranks=other.ranks,
        ticket=requested.ticket.to_json(),
        memory_ids=read.piece.route.memory_ids,
        epoch=command.epoch,
        source=dict(command.tables),
        target=dict(requested.tables),
        first_token=requested.first_token,
        num_tokens=requested.num_tokens,
        start=command.start,
        stop=command.stop,
        last=command.last,
        zero_tail=requested.zero_tail,
        timeout_s=timeout_s,
    )
