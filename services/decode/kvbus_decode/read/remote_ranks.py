"""Asks the agents that have other ranks of our engine to read their part of each chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvbus.agent.process.service import Agent
from kvbus.errors import KVBusError, RequestTimeout
from kvbus.keys.roles import Role
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.message import Empty
from kvbus.protocol.remote_ranks import AbortDelegate, Delegate, Delegated
from kvbus_decode.peer.directory import Peer, PeerAddress, PeerDirectory
from kvbus_decode.read import events as ev
from kvbus_decode.read.compare import cannot_compare
from kvbus_decode.read.leg import LegState

UNTIL_ENDED_S = 86_400.0
"""The other agent answers when it has ended, and ends by the chunk's own deadline."""
ABORT_TIMEOUT_S = 5.0


@dataclass(slots=True, eq=False)
class DelegateJob:
    """What one other agent reads."""

    other: AgentRanks
    question: Delegate
    peer: Peer | None = None


class RemoteRanks:
    """The asking side, for the fetches of an engine whose home is here."""

    def __init__(
        self, agent: Agent, peers: PeerDirectory, dispatch: Callable[[ev.Event], None]
    ) -> None:
        self._agent, self._peers, self._dispatch = agent, peers, dispatch

    def ask(self, command: ev.AskDelegate) -> None:
        """Have the other agent read; it answers when nothing of it is in flight any more."""
        work: DelegateJob = command.leg.work
        try:
            other = work.other
            address = PeerAddress(other.endpoint, other.server_key, Role.DECODE)
            work.peer = self._peers.acquire(address)
        except KVBusError as error:
            self._on_reply(command, error)
        else:
            work.peer.ask(work.question, UNTIL_ENDED_S, partial(self._on_reply, command))

    def abort(self, command: ev.StopDelegate) -> None:
        """Ask it to stop, again and again until it says that it has."""
        leg, work = command.leg, command.leg.work

        def on_reply(outcome: Empty | KVBusError) -> None:
            if isinstance(outcome, RequestTimeout) and leg.state is LegState.DELEGATED:
                self.abort(command)

        message = AbortDelegate(fetch_id=work.question.fetch_id, access=work.other.access)
        work.peer.ask(message, ABORT_TIMEOUT_S, on_reply)  # else it stops at the deadline

    def _on_reply(self, command: ev.AskDelegate, done: Delegated | KVBusError) -> None:
        """It has ended; so it has when it came back as a new process: that writes no more."""
        key, leg = command.key, command.leg
        if leg.work.peer is not None:
            self._peers.release(leg.work.peer)
        if isinstance(done, KVBusError):
            self._dispatch(ev.DelegateEnded(key, leg, error=done))
        elif done.one_in != leg.work.question.one_in:
            error = cannot_compare(f"decode agent at {leg.work.other.endpoint}")
            self._dispatch(ev.DelegateEnded(key, leg, error=error))
        else:
            self._dispatch(ev.DelegateEnded(key, leg, done.num_bytes, done.path))
