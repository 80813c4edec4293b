"""Asks the agents that have other ranks of our engine to read their part of each chunk."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import anyio

from kvbus.agent.process.service import Agent
from kvbus.errors import ErrorCode, KVBusError, PeerLost, RequestRefused
from kvbus.keys.roles import Role
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.remote_ranks import AbortDelegate, Delegate, Delegated
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.directory import Peer, PeerAddress, PeerDirectory
from kvbus_decode.read import events as ev
from kvbus_decode.read.compare import cannot_compare
from kvbus_decode.read.leg import LegState

UNTIL_STOPPED_S = 86_400.0
"""A fetch stops its legs at its own deadline, which is earlier."""
ASK_S, PAUSE_S = 2.0, 0.5
LATE_S = 30.0
"""A request that was sent comes within this, or never: TCP gives up after 20 s (`TCP_MAXRT`)."""
EXITS_WITHIN_S = 5.0
"""Once an agent has closed its transport."""

OF_THE_CONNECTION = (ErrorCode.FORBIDDEN, ErrorCode.CLOSED, ErrorCode.STALE)
"""With these a server refuses what it has begun, too: our key or its own end ended the session."""


@dataclass(slots=True, eq=False)
class DelegateJob:
    """What one other agent reads; ``peers`` are those of the fetch, held until its end."""

    other: AgentRanks
    question: Delegate
    peers: list[Peer]
    peer: Peer | None = None
    request_id: int = 0
    is_sent: bool = False

    @property
    def address(self) -> PeerAddress:
        """Where it is asked."""
        return PeerAddress(self.other.endpoint, self.other.server_key, Role.DECODE)

    def note_sent(self) -> None:
        """From here on the other agent may write."""
        self.is_sent = True


# The other agent writes into the blocks of our engine. What ends that, and what does not:
#
#     its answer to the `delegate`          nothing is in flight there
#     it was never sent                     nothing ever was
#     a new boot id at its address          its process is gone, and a process that is gone writes
#                                           nothing: its kernel has ended its queue pairs, too
#     it is on this machine, and its port   killed: the kernel closes the port when the last thread
#     stays closed for `_exits_s`           is gone. Ended: it closes the port first, then the
#                                           transport, then it exits
#     any other error of the `delegate`     nothing is known: our key was refused for a while, it
#                                           hung up, we dropped the connection. The fetch fails at
#                                           once, and its blocks are withheld
#
# When the leg is stopped the `delegate` is sent no more, and `abort_delegate` is asked, on whatever
# connection there is, until the answer is that it has ended. That answer is final: the other agent
# refuses a `delegate` that comes later, as one on another connection may.
#
# An agent on another machine that cannot be reached may be gone, or may be cut off and read on. (A
# port that is closed there says nothing: a firewall can refuse in its name.) One that is cut off
# ends by itself, and so the blocks come back:
#
#      leg stopped          last `delegate` comes     its deadline          its READs were ended
#      ────┼─────── LATE_S ────────┼───── timeout_s ───────┼── quarantine_timeout_s ──┼──▶ free
#
# Both agents have the same quarantine_timeout_s; copies end with the piece that they are at. A
# process that is stopped (SIGSTOP) keeps no deadline: it may write on as soon as it continues. Its
# kernel keeps the connection, so while there is a connection the time does not count.
class RemoteRanks:
    """The asking side, for the fetches of an engine whose home is here.

    ``on_trouble`` is told of an error, by the key of the read, while the other agent may still
    write; it has the leg stopped.
    """

    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        peers: PeerDirectory,
        dispatch: Callable[[ev.Event], None],
        on_trouble: Callable[[Hashable, KVBusError], None],
    ) -> None:
        self._agent, self._peers = agent, peers
        self._dispatch, self._on_trouble = dispatch, on_trouble
        self._exits_s = config.transport.close_timeout_s + EXITS_WITHIN_S
        self._drains_s = LATE_S + config.quarantine_timeout_s

    def ask(self, command: ev.AskDelegate) -> None:
        """Have the other agent read; it answers when nothing of it is in flight any more."""
        work: DelegateJob = command.leg.work
        try:
            work.peer = self._peers.acquire(work.address)
            if work.peer in work.peers:
                self._peers.release(work.peer)
            else:
                work.peers.append(work.peer)
            work.request_id = work.peer.client.send(
                work.question,
                timeout_s=UNTIL_STOPPED_S,
                on_reply=partial(self._on_reply, command),
                on_sent=work.note_sent,
            )
        except KVBusError as error:
            self._dispatch(ev.DelegateEnded(command.key, command.leg, error=error))

    def abort(self, command: ev.StopDelegate) -> None:
        """Have it stop; the leg is over when it has, or cannot write any more."""
        work: DelegateJob = command.leg.work
        if work.peer is not None:
            work.peer.client.take_back(work.request_id)
        self._agent.tasks.start_soon(self._wait_for_end, command)

    def _on_reply(self, command: ev.AskDelegate, done: Delegated | KVBusError) -> None:
        key, leg, work = command.key, command.leg, command.leg.work
        if isinstance(done, Delegated) and done.one_in != work.question.one_in:
            done = cannot_compare(f"decode agent at {work.other.endpoint}")
        elif isinstance(done, KVBusError) and work.is_sent and not _has_ended(done):
            self._on_trouble(key, done)
            return
        if isinstance(done, KVBusError):
            self._dispatch(ev.DelegateEnded(key, leg, error=done))
        else:
            self._dispatch(ev.DelegateEnded(key, leg, done.num_bytes, done.path))

    async def _wait_for_end(self, command: ev.StopDelegate) -> None:
        leg, work, loop = command.leg, command.leg.work, self._agent.loop
        alone_since: float | None = None
        while work.is_sent and leg.state is LegState.DELEGATED and not await self._says(work):
            client = work.peer.client
            if client.closed or client.missing:
                alone_since = alone_since or loop.time()
                alone_s = loop.time() - alone_since
                if alone_s >= self._drains_s + work.question.timeout_s:
                    break
                if client.is_gone_here and alone_s >= self._exits_s:
                    break
            else:
                alone_since = None
            await anyio.sleep(PAUSE_S)
        self._dispatch(ev.DelegateEnded(command.key, leg))

    async def _says(self, work: DelegateJob) -> bool:
        """Whether the other agent says that it has ended, or is a new process."""
        question = work.question
        message = AbortDelegate(
            fetch_id=question.fetch_id, access=question.access, token=question.token
        )
        try:
            peer = work.peer = self._peers.acquire(work.address)
        except KVBusError:  # its key is not trusted any more
            return False
        try:
            aborted = await peer.client.ask(message, timeout_s=ASK_S)
        except KVBusError as error:
            return isinstance(error, PeerLost)
        finally:
            self._peers.release(peer)
        return aborted.ended


def _has_ended(error: KVBusError) -> bool:
    """Whether the error of a request that was sent says that nothing of it is in flight."""
    if isinstance(error, RequestRefused):
        return error.code not in OF_THE_CONNECTION
    return isinstance(error, PeerLost)
