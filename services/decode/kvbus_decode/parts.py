"""Parts of a fetch for an engine whose ranks are at several agents.

The home (`PartClient`) requests a part from each other agent, which fetches it (`PartServer`).
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b

import anyio

from kvbus.agent.config import CLOSES_WITHIN_S
from kvbus.agent.loop import failure
from kvbus.agent.service import Agent
from kvbus.bus import Call, new_secret
from kvbus.errors import ErrorCode, KVBusError, LocalError, PeerLost
from kvbus.protocol.engine import AgentRanks, Fetched
from kvbus.protocol.message import Empty, Role, refusal, to_body
from kvbus.protocol.peer import CancelPart, FetchPart, PartFetched
from kvbus.table.table import Promise
from kvbus_decode.chunk import FetchResources
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.peers import PeerDirectory
from kvbus_decode.remote_agent import PeerAddress

PAUSE_S = 0.5
LATE_S = 30.0
"""A sent request arrives within this or never: TCP times out after 20 s (`TCP_MAXRT`)."""
EXITS_WITHIN_S = 5.0
"""Time from the close of an agent's port to its exit."""
MAX_ENDED = 4096
"""Limit of remembered parts, which do not begin again."""

CANCELLED = PartFetched(0, "", code=ErrorCode.CANCELLED, message="the part was cancelled")

Answer = PartFetched | KVBusError


@dataclass(slots=True, eq=False)
class _RemotePart:
    """The part of another agent. It may write from ``is_sent`` on."""

    address: PeerAddress
    message: FetchPart
    answer: Answer | None = None
    is_sent: bool = False
    is_stopped: bool = False
    wakes: anyio.Event = field(default_factory=anyio.Event)

    @property
    def has_ended(self) -> bool:
        return not self.is_sent or isinstance(self.answer, PartFetched | PeerLost)

    @property
    def failure(self) -> KVBusError | None:
        answer = self.answer
        if not isinstance(answer, PartFetched):
            return answer
        return refusal(to_body(answer)) if answer.code else None

    def note_sent(self) -> None:
        self.is_sent = True

    def settle(self, answer: Answer) -> None:
        self.answer = answer
        self.wakes.set()


# The other agent writes into the blocks of the engine here. Proofs that it no longer writes:
#
#     its reply to the `fetch_part`         nothing is in flight there, even if the part failed
#
#     the `fetch_part` was never sent       nothing was ever in flight
#
#     a new boot id at its address          the process is dead, and cannot write: its kernel has
#                                           closed its queue pairs, too
#
#     it is on this machine, and its port   a killed process: the kernel closes the port after the
#     stays closed for `_exits_s`           last thread has ended, and the data process is killed.
#                                           An orderly end: the agent closes the port, ends its data
#                                           process, and exits
#
# An error of the `fetch_part` proves nothing. The part was not begun, or its session was closed
# while it runs (too many sessions, an untrusted key), or this agent dropped the connection. The
# fetch fails immediately, and its blocks are withheld.
#
# After a failure the `fetch_part` is not sent again. `cancel_part` is sent instead, without a
# timeout for its reply: again over each new connection, and again after a refusal. Its reply is
# final: the other agent then refuses a late `fetch_part`, which may arrive over another connection.
#
# An unreachable agent on another machine may be dead, or may be cut off and still read. (A closed
# port there proves nothing: a firewall can refuse connections in its name.) A cut-off agent ends
# its reads in time, which frees the blocks:
#
#      fetch failed         last `fetch_part` comes   its deadline          its READs were ended
#      ────┼─────── LATE_S ────────┼───── timeout_s ───────┼── quarantine_timeout_s ──┼──▶ free
#
# Both agents have the same quarantine_timeout_s; copies stop after their current piece. A process
# stopped by SIGSTOP keeps no deadline: it may write as soon as it continues. Its kernel keeps the
# connection, so the time counts only while there is no connection.
class PartClient:
    def __init__(
        self,
        agent: Agent,
        config: DecodeConfig,
        peers: PeerDirectory,
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._agent, self._peers, self._dispatch = agent, peers, dispatch
        self._exits_s = CLOSES_WITHIN_S + EXITS_WITHIN_S
        self._drains_s = LATE_S + config.quarantine_timeout_s

    def request(self, command: ev.RequestRemoteParts, promise: Promise[ev.Event]) -> None:
        requested = command.requested
        parts = [
            _RemotePart(_address(other), self._message(requested, other))
            for other in requested.remote_ranks
        ]
        requested.resources.stop_parts = partial(_stop, parts)
        self._agent.tasks.start_soon(self._fetch, command, parts, promise)

    def end_earlier(self, command: ev.EndEarlierParts, promise: Promise[ev.Event]) -> None:
        self._agent.tasks.start_soon(self._end_earlier, command.requested, promise)

    async def _end_earlier(self, requested: ev.Requested, promise: Promise[ev.Event]) -> None:
        timeout_s = self._left_s(requested)
        async with anyio.create_task_group() as tasks:
            for other in requested.remote_ranks:
                for number in range(requested.request.repeated):
                    origin = _origin(requested, other, number)
                    tasks.start_soon(self._wait_for_end, _address(other), origin, timeout_s)
        promise(ev.ReadEnded(requested.fetch_id, elsewhere=True))

    def _message(self, requested: ev.Requested, other: AgentRanks) -> FetchPart:
        fetch: FetchResources = requested.resources
        request = requested.request
        return FetchPart(
            token=new_secret(),
            fetch_id=request.fetch_id,
            engine_id=requested.engine_id,
            rank_secret=other.rank_secret,
            ranks=other.ranks,
            ticket=requested.ticket.to_json(),
            memory_ids=fetch.route.memory_ids if fetch.route else (),
            first_token=request.first_token,
            num_tokens=request.num_tokens,
            tables=request.tables,
            timeout_s=self._left_s(requested),
            zero_tail=request.zero_tail,
            priority=request.priority,
            traceparent=request.traceparent,
            pool_id=requested.pool.engine_id if requested.pool else "",
            pool_instance=requested.pool.engine_instance if requested.pool else "",
            origin=_origin(requested, other, request.repeated),
            after=request.after,
        )

    def _left_s(self, requested: ev.Requested) -> float:
        fetch: FetchResources = requested.resources
        return max(1e-3, fetch.deadline - self._agent.loop.time())

    async def _fetch(
        self, command: ev.RequestRemoteParts, parts: list[_RemotePart], promise: Promise[ev.Event]
    ) -> None:
        async with anyio.create_task_group() as tasks:
            for one in parts:
                tasks.start_soon(self._fetch_one, command, one)
        key = command.requested.fetch_id
        fetched = [one.answer for one in parts if isinstance(one.answer, PartFetched)]
        path = next((one.path for one in fetched if one.path), "")
        num_bytes = sum(one.num_bytes for one in fetched)
        promise(ev.ReadEnded(key, num_bytes, None, path, elsewhere=True))

    async def _fetch_one(self, command: ev.RequestRemoteParts, part: _RemotePart) -> None:
        fetch: FetchResources = command.requested.resources
        if part.is_stopped:
            return
        try:
            peer = self._peers.acquire(part.address)
            fetch.peers.append(peer)
            request_id = peer.client.send(
                part.message, timeout_s=math.inf, on_reply=part.settle, on_sent=part.note_sent
            )
        except Exception as error:
            self._dispatch(ev.StepFailed(fetch.key, command.attempt, failure(error)))
            return
        await part.wakes.wait()
        peer.client.take_back(request_id)
        if part.failure is not None:
            self._dispatch(ev.StepFailed(fetch.key, command.attempt, part.failure))
        if not part.has_ended:
            message = part.message
            await self._wait_for_end(part.address, message.token, message.timeout_s)

    async def _wait_for_end(self, address: PeerAddress, token: str, timeout_s: float) -> None:
        """Cancel a part; return when the agent can no longer write for it."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, address, timeout_s, tasks.cancel_scope)
            await self._cancel(address, token)
            tasks.cancel_scope.cancel()

    async def _cancel(self, address: PeerAddress, token: str) -> None:
        cancel, has_ended = CancelPart(token=token), False
        while not has_ended:
            try:
                peer = self._peers.acquire(address)
            except KVBusError:  # its key was revoked
                await anyio.sleep(PAUSE_S)
                continue
            try:
                await peer.client.request(cancel, timeout_s=math.inf)
                has_ended = True
            except PeerLost:
                has_ended = True
            except Exception as error:  # even a defect: only a reply frees the blocks
                failure(error)
                await anyio.sleep(PAUSE_S)
            finally:
                self._peers.release(peer)

    async def _watch(
        self, address: PeerAddress, timeout_s: float, waiting: anyio.CancelScope
    ) -> None:
        """Cancel ``waiting`` after so long without a connection that no write can come."""
        loop, alone_since = self._agent.loop, math.inf
        while True:
            peer, now = self._peers.find(address), loop.time()
            client = None if peer is None else peer.client
            is_alone = client is None or client.closed or bool(client.missing)
            alone_since = min(alone_since, now) if is_alone else math.inf
            is_killed = client is not None and client.is_gone_here
            cut_off_s = self._drains_s + timeout_s
            if now - alone_since >= (self._exits_s if is_killed else cut_off_s):
                waiting.cancel()
                return
            await anyio.sleep(PAUSE_S)


@dataclass(slots=True, eq=False)
class Part:
    """A part that is fetched here.

    The home's later processes know it by ``origin``. ``calls`` are repeats of the request.
    """

    key: str
    on_end: Callable[["Part"], None]
    calls: list[Call]
    origin: str = ""
    cancelled_by: Call | None = None
    outcome: PartFetched | None = None

    def reply(self, fetched: Fetched) -> None:
        self.outcome = PartFetched(
            num_bytes=fetched.num_bytes,
            path=fetched.path,
            code=fetched.code,
            message=fetched.message,
        )
        if fetched.blocks_free:
            self.end()

    def refuse(self, error: KVBusError) -> None:
        self.on_end(self)
        for call in self.calls:
            call.refuse(error)

    def end(self) -> None:
        self.on_end(self)


class PartServer:
    """The parts that other agents request.

    A refused part leaves no state, as its caller may be unauthorized.
    """

    def __init__(
        self,
        requested: Callable[[FetchPart, Part], ev.Requested],
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._requested, self._dispatch = requested, dispatch
        self._live: dict[str, Part] = {}
        self._ended: OrderedDict[str, PartFetched] = OrderedDict()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def find(self, key: str) -> Part | None:
        return self._live.get(key)

    def fetch(self, request: FetchPart, call: Call) -> None:
        """Fetch the part; a repeated request joins it, or gets its outcome."""
        key, origin = _key(request.token), _key(request.origin) if request.origin else ""
        if (outcome := self._ended.get(key, self._ended.get(origin))) is not None:
            call.reply(outcome)
            return
        if (live := self._live.get(key)) is not None:
            live.calls.append(call)
            return
        part = Part(key, self._end, [call], origin)
        requested = self._requested(request, part)
        self._live[key] = part
        self._dispatch(requested)

    def cancel(self, request: CancelPart, call: Call) -> None:
        """Reply when nothing of the part is in flight, or can be later."""
        key = _key(request.token)
        part = next((one for one in self._live.values() if key in (one.key, one.origin)), None)
        if part is None or part.key != key:
            self._remember(key, self._ended.get(key, CANCELLED))
        if part is None:
            call.reply(Empty())
            return
        if part.cancelled_by is not None:
            part.cancelled_by.refuse(LocalError("it was requested again", code=ErrorCode.BUSY))
        part.cancelled_by = call
        self._dispatch(ev.CancelRequested(part.key, None))  # `_end` replies

    def _end(self, part: Part) -> None:
        del self._live[part.key]
        if part.outcome is not None:
            self._remember(part.key, part.outcome)
            for call in part.calls:
                if not call.answered:  # a defect after the start has already been reported
                    call.reply(part.outcome)
        if part.cancelled_by is not None:
            part.cancelled_by.reply(Empty())

    def _remember(self, key: str, outcome: PartFetched) -> None:
        self._ended[key] = outcome
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _stop(parts: list[_RemotePart]) -> None:
    for one in parts:
        one.is_stopped = True
        one.wakes.set()


def _address(other: AgentRanks) -> PeerAddress:
    return PeerAddress(other.endpoint, other.server_key, Role.DECODE)


def _origin(requested: ev.Requested, other: AgentRanks, repeated: int) -> str:
    """Return a part's ``origin``, which each process of the home derives from the token."""
    named = f"{requested.commit_token} {other.endpoint} {repeated}"
    return blake2b(named.encode(), digest_size=16).hexdigest()


def _key(token: str) -> str:
    return ev.fetch_key("part", token)
