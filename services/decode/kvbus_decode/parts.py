"""Parts: what each agent fetches of a fetch for an engine whose ranks are at several agents.

The home asks each other agent for its part (`PartClient`). There it is a fetch like any other, but
that it answers another agent and not an engine (`PartServer`).
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
from kvbus.table import Promise
from kvbus_decode.chunk import FetchResources
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch import events as ev
from kvbus_decode.peers import PeerDirectory
from kvbus_decode.remote_agent import PeerAddress

PAUSE_S = 0.5
"""So often it is looked whether an agent is still there, and a refused `cancel_part` asked anew."""
LATE_S = 30.0
"""A request that was sent comes within this, or never: TCP gives up after 20 s (`TCP_MAXRT`)."""
EXITS_WITHIN_S = 5.0
"""Once an agent has closed its port: its data process ends, and then the agent."""
MAX_ENDED = 4096
"""Parts that have ended or were cancelled before they came: they do not begin again."""

CANCELLED = PartFetched(0, "", code=ErrorCode.CANCELLED, message="the part was cancelled")

Answer = PartFetched | KVBusError


@dataclass(slots=True, eq=False)
class _Asked:
    """The part of one other agent, as its home sees it; ``wakes`` when there is news of it.

    Once the question ``is_sent`` the other agent may write; ``is_stopped`` when the fetch is over.
    """

    address: PeerAddress
    question: FetchPart
    answer: Answer | None = None
    is_sent: bool = False
    is_stopped: bool = False
    wakes: anyio.Event = field(default_factory=anyio.Event)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is in flight at the other agent.

        A refusal proves nothing, whatever its code: the socket refuses calls that have begun, too.
        """
        return not self.is_sent or isinstance(self.answer, PartFetched | PeerLost)

    @property
    def failure(self) -> KVBusError | None:
        """Why the part failed, or was never begun."""
        answer = self.answer
        if not isinstance(answer, PartFetched):
            return answer
        return refusal(to_body(answer)) if answer.code else None

    def note_sent(self) -> None:
        self.is_sent = True

    def settle(self, answer: Answer) -> None:
        self.answer = answer
        self.wakes.set()


# The other agent writes into the blocks of our engine. What ends that, and what does not:
#
#     its reply to the `fetch_part`         nothing is in flight there, also if the part failed
#     it was never sent                     nothing ever was
#     a new boot id at its address          its process is gone, and a process that is gone writes
#                                           nothing: its kernel has ended its queue pairs, too
#     it is on this machine, and its port   killed: the kernel closes the port when the last thread
#     stays closed for `_exits_s`           is gone. Its data process is killed then. Ended: it
#                                           closes the port, ends its data process, and exits
#     any error of the `fetch_part`         nothing is known: it was not begun, or its session was
#                                           ended while it runs (too many sessions, a key that is
#                                           not trusted), or we dropped the connection. The fetch
#                                           fails at once, and its blocks are withheld
#
# When the fetch fails, the `fetch_part` is sent no more, and `cancel_part` is asked, once, however
# late its answer is: it is sent again when the connection is new, and asked anew when it is
# refused. Its answer is final: the other agent refuses a `fetch_part` that comes later, as one on
# another connection may.
#
# An agent on another machine that cannot be reached may be gone, or may be cut off and read on. (A
# port that is closed there says nothing: a firewall can refuse in its name.) One that is cut off
# ends by itself, and so the blocks come back:
#
#      fetch failed         last `fetch_part` comes   its deadline          its READs were ended
#      ────┼─────── LATE_S ────────┼───── timeout_s ───────┼── quarantine_timeout_s ──┼──▶ free
#
# Both agents have the same quarantine_timeout_s; copies end with the piece that they are at. A
# process that is stopped (SIGSTOP) keeps no deadline: it may write on as soon as it continues. Its
# kernel keeps the connection, so while there is a connection the time does not count.
class PartClient:
    """Asks the other agents of an engine whose home is here for their parts."""

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

    def ask(self, command: ev.AskOthers, promise: Promise[ev.Event]) -> None:
        requested = command.requested
        parts = [
            _Asked(_address(other), self._question(requested, other)) for other in requested.others
        ]
        requested.resources.stop_parts = partial(_stop, parts)
        self._agent.tasks.start_soon(self._fetch, command, parts, promise)

    def end_earlier(self, command: ev.EndEarlierParts, promise: Promise[ev.Event]) -> None:
        """End what the earlier processes of this agent have asked for."""
        self._agent.tasks.start_soon(self._end_earlier, command.requested, promise)

    async def _end_earlier(self, requested: ev.Requested, promise: Promise[ev.Event]) -> None:
        timeout_s = self._left_s(requested)
        async with anyio.create_task_group() as tasks:
            for other in requested.others:
                for number in range(requested.asked.repeated):
                    origin = _origin(requested, other, number)
                    tasks.start_soon(self._wait_for_end, _address(other), origin, timeout_s)
        promise(ev.ReadEnded(requested.fetch_id, elsewhere=True))

    def _question(self, requested: ev.Requested, other: AgentRanks) -> FetchPart:
        fetch: FetchResources = requested.resources
        asked = requested.asked
        return FetchPart(
            token=new_secret(),
            fetch_id=asked.fetch_id,
            engine_id=requested.engine_id,
            access=other.access,
            ranks=other.ranks,
            ticket=requested.ticket.to_json(),
            memory_ids=fetch.route.memory_ids if fetch.route else (),
            first_token=asked.first_token,
            num_tokens=asked.num_tokens,
            tables=asked.tables,
            timeout_s=self._left_s(requested),
            zero_tail=asked.zero_tail,
            priority=asked.priority,
            traceparent=asked.traceparent,
            origin=_origin(requested, other, asked.repeated),
        )

    def _left_s(self, requested: ev.Requested) -> float:
        fetch: FetchResources = requested.resources
        return max(1e-3, fetch.deadline - self._agent.loop.time())

    async def _fetch(
        self, command: ev.AskOthers, parts: list[_Asked], promise: Promise[ev.Event]
    ) -> None:
        async with anyio.create_task_group() as tasks:
            for one in parts:
                tasks.start_soon(self._fetch_one, command, one)
        key = command.requested.fetch_id
        fetched = [one.answer for one in parts if isinstance(one.answer, PartFetched)]
        path = next((one.path for one in fetched if one.path), "")
        num_bytes = sum(one.num_bytes for one in fetched)
        promise(ev.ReadEnded(key, num_bytes, None, path, elsewhere=True))

    async def _fetch_one(self, command: ev.AskOthers, part: _Asked) -> None:
        """Return when the other agent has fetched its part, or cannot write any more."""
        fetch: FetchResources = command.requested.resources
        if part.is_stopped:
            return
        try:
            peer = self._peers.acquire(part.address)
            fetch.peers.append(peer)
            request_id = peer.client.send(
                part.question, timeout_s=math.inf, on_reply=part.settle, on_sent=part.note_sent
            )
        except Exception as error:
            self._dispatch(ev.StepFailed(fetch.key, command.attempt, failure(error)))
            return
        await part.wakes.wait()
        peer.client.take_back(request_id)
        if part.failure is not None:
            self._dispatch(ev.StepFailed(fetch.key, command.attempt, part.failure))
        if not part.has_ended:
            question = part.question
            await self._wait_for_end(part.address, question.token, question.timeout_s)

    async def _wait_for_end(self, address: PeerAddress, token: str, timeout_s: float) -> None:
        """Cancel a part; return when the agent at ``address`` does not write for it any more."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, address, timeout_s, tasks.cancel_scope)
            await self._cancel(address, token)
            tasks.cancel_scope.cancel()

    async def _cancel(self, address: PeerAddress, token: str) -> None:
        """Return when the other agent says that the part has ended, or is a new process."""
        cancel, has_ended = CancelPart(token=token), False
        while not has_ended:
            try:
                peer = self._peers.acquire(address)
            except KVBusError:  # its key is not trusted any more
                await anyio.sleep(PAUSE_S)
                continue
            try:
                await peer.client.ask(cancel, timeout_s=math.inf)
                has_ended = True
            except PeerLost:
                has_ended = True
            except Exception as error:  # a defect too: only an answer frees the blocks
                failure(error)
                await anyio.sleep(PAUSE_S)
            finally:
                self._peers.release(peer)

    async def _watch(
        self, address: PeerAddress, timeout_s: float, waiting: anyio.CancelScope
    ) -> None:
        """Cancel ``waiting`` when there was no connection for so long that nothing is written."""
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
    """A part that is fetched here; ``key`` names it in the fetch table, ``origin`` its home there.

    ``calls`` ask for it: several, where the home has made a new connection. ``cancelled_by`` wants
    to know its end, too. Its ``outcome`` is sent when its blocks are free.
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
        """Refuse a part that the fetch table has not begun."""
        self.on_end(self)
        for call in self.calls:
            call.refuse(error)

    def end(self) -> None:
        self.on_end(self)


class PartServer:
    """Has parts fetched for homes elsewhere; ``requested`` makes the event that begins one.

    A part that is refused leaves nothing here: its caller may have shown no right to it. The home
    cancels it, so that a late ``fetch_part`` does not begin it.
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
        """Parts that are fetched now, or whose blocks are not free."""
        return len(self._live)

    def find(self, key: str) -> Part | None:
        """The live part that is called so in the fetch table."""
        return self._live.get(key)

    def fetch(self, asked: FetchPart, call: Call) -> None:
        """Fetch the part; a repeat joins it, or gets the outcome again. Raises `KVBusError`."""
        key, origin = _key(asked.token), _key(asked.origin) if asked.origin else ""
        if (outcome := self._ended.get(key, self._ended.get(origin))) is not None:
            call.reply(outcome)
            return
        if (live := self._live.get(key)) is not None:
            live.calls.append(call)
            return
        part = Part(key, self._end, [call], origin)
        requested = self._requested(asked, part)
        self._live[key] = part
        self._dispatch(requested)

    def cancel(self, asked: CancelPart, call: Call) -> None:
        """End the part; answered when nothing of it is in flight, nor will be."""
        key = _key(asked.token)
        part = next((one for one in self._live.values() if key in (one.key, one.origin)), None)
        if part is None or part.key != key:
            self._remember(key, self._ended.get(key, CANCELLED))
        if part is None:
            call.reply(Empty())
            return
        if part.cancelled_by is not None:
            part.cancelled_by.refuse(LocalError("it was asked again", code=ErrorCode.BUSY))
        part.cancelled_by = call
        self._dispatch(ev.CancelRequested(part.key, None))  # what counts is the end of the part

    def _end(self, part: Part) -> None:
        del self._live[part.key]
        if part.outcome is not None:
            self._remember(part.key, part.outcome)
            for call in part.calls:
                if not call.answered:  # a defect behind the begin was answered at once
                    call.reply(part.outcome)
        if part.cancelled_by is not None:
            part.cancelled_by.reply(Empty())

    def _remember(self, key: str, outcome: PartFetched) -> None:
        self._ended[key] = outcome
        if len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)


def _stop(parts: list[_Asked]) -> None:
    for one in parts:
        one.is_stopped = True
        one.wakes.set()


def _address(other: AgentRanks) -> PeerAddress:
    return PeerAddress(other.endpoint, other.server_key, Role.DECODE)


def _origin(requested: ev.Requested, other: AgentRanks, repeated: int) -> str:
    """Return the ``origin`` of parts that the home asks for when it has the fetch for that time.

    An earlier process of the home has made the same from the token of the fetch.
    """
    named = f"{requested.take_token} {other.endpoint} {repeated}"
    return blake2b(named.encode(), digest_size=16).hexdigest()


def _key(token: str) -> str:
    return ev.fetch_key("part", token)
