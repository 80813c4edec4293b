"""The fetches of a decode engine: their results, and when their blocks are free."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Unpack

from msgspec.structs import replace

from kvbus.engine.connection import Connection
from kvbus.engine.holds import TicketHolds
from kvbus.engine.later import Completion, Runner
from kvbus.engine.messages import BlockIds, FetchOptions, OnLanded, fetch_message
from kvbus.engine.retrying import NOT_BEGUN, PendingRequest, RequestRetrier
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    FetchFailed,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
)
from kvbus.geometry import EngineSpec
from kvbus.protocol.engine import BlocksFreed, CancelFetch, Fetched, Landed, Outcome, StartFetch
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, from_body
from kvbus.protocol.ticket import Rendezvous

REQUESTED = "requested"
"""The agent did not begin it."""
LOST = "lost"
"""The agent was lost, and none followed in time."""
MAX_RELEASES_AT_ONCE = 8
MAX_RELEASES = 4096
RELEASE_WITHIN_S = 10.0
RELEASE_PAUSE_S = 1.0
AGENT_ENDED = (ErrorCode.DRAINING, ErrorCode.CLOSED, ErrorCode.PEER_LOST)


class FetchRequest(PendingRequest[StartFetch]):
    """A fetch in the link's event loop."""

    def __init__(
        self, runner: Runner, message: StartFetch, on_landed: OnLanded | None, retry_until: float
    ) -> None:
        super().__init__(message, retry_until)
        self.on_landed = on_landed
        self.ended: Completion[Fetched] = Completion(runner)
        self.freed: Completion[None] = Completion(runner)
        self.connection: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.notice: Fetched | None = None
        """Stage ``silent`` means a stopped agent."""
        self.is_cancelled = self.releases_offer = False
        """``releases_offer``: the engine wants this, and no agent has done it."""

    @property
    def fetch_id(self) -> str:
        return self.message.fetch_id

    @property
    def is_free(self) -> bool:
        """Whether no agent can write into the blocks."""
        return self.freed.done() and self.freed.exception() is None

    @property
    def is_repeated(self) -> bool:
        return self.message.repeated > 0

    def repeat(self) -> None:
        self.message = replace(self.message, repeated=self.message.repeated + 1)

    def renew(self) -> None:
        if self.message.timeout_s is not None:
            left_s = max(1e-3, self.retry_until - time.monotonic())
            self.message = replace(self.message, timeout_s=left_s)

    def left_s(self, least_s: float) -> float:
        """Return the time to the deadline; without one, at least ``least_s``."""
        left_s = self.retry_until - time.monotonic()
        return max(0.0 if self.message.timeout_s is not None else least_s, left_s)

    def end(self, fetched: Fetched) -> None:
        if self.notice is None:
            self.notice = fetched
            if fetched.blocks_free:
                self.freed.settle(None)
            is_good = fetched.outcome is Outcome.COMPLETED
            self.ended.settle(fetched if is_good else failure_of(fetched))
            if self.freed.done():
                self.call_last()
            else:
                self.on_end()

    def free(self, doubt: KVBusError | None = None) -> None:
        if not self.freed.done():
            self.freed.settle(doubt)
            if self.notice is not None:
                self.call_last()


class Fetches(RequestRetrier[FetchRequest]):
    """The fetches of one engine; with ``has_remote_ranks``, other agents write, too."""

    def __init__(
        self,
        runner: Runner,
        engine: EngineSpec,
        *,
        has_remote_ranks: bool,
        request_timeout_s: float,
        logger: logging.Logger,
        agent_wait_s: float = 10.0,
    ) -> None:
        super().__init__(agent_wait_s=agent_wait_s)
        self.runner, self._engine, self._has_remote_ranks = runner, engine, has_remote_ranks
        self._request_timeout_s = request_timeout_s
        self.holds, self.releases = TicketHolds(runner, logger), _Releases(self, logger)
        self._fetches: dict[str, FetchRequest] = {}
        self._away: dict[FetchRequest, Connection] = {}
        """Until the last process of the lost agent has ended."""

    def new(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int | None,
        block_ids: BlockIds,
        **options: Unpack[FetchOptions],
    ) -> FetchRequest:
        """Make a fetch, in any thread; copy the ids. Raises `GeometryError`."""
        message = fetch_message(
            self._engine, ticket, num_tokens=num_tokens, block_ids=block_ids, **options
        )
        overdue_s = message.timeout_s or self._request_timeout_s
        return FetchRequest(
            self.runner, message, options.get("on_landed"), time.monotonic() + overdue_s
        )

    def sent(self, one: FetchRequest, connection: Connection) -> None:
        one.connection = connection
        self.holds.remove(one.message.ticket)
        self._fetches[one.fetch_id] = one

    def accepted(self, one: FetchRequest, reply: Fetched) -> None:
        if one.notice is not None:  # it has ended: the reply can only free the blocks
            if reply.blocks_free:
                self._free(one.fetch_id)
            return
        if reply.blocks_free:
            self._fetches.pop(one.fetch_id, None)
        one.end(reply)

    def on_refusal(self, connection: Connection, one: FetchRequest, error: KVBusError) -> None:
        """Without a clear refusal, the agent may have begun it: the blocks stay in doubt."""
        if connection.lost is not None:
            return  # `on_lost` ends it
        if isinstance(error, RequestRefused):
            self._fetches.pop(one.fetch_id, None)
            if one.notice is not None:
                one.free()
                return
            if one.is_cancelled and error.code in (ErrorCode.BUSY, *NOT_BEGUN):  # no retry
                self._end_cancelled(one, is_lost=False)
                return
        super().on_refusal(connection, one, error)

    def refused(self, one: FetchRequest, error: KVBusError) -> None:
        is_lost = one.is_repeated and not isinstance(error, RequestRefused)
        self._end(one, failed(one, error, stage=LOST if is_lost else REQUESTED), error)

    def wait(self, one: FetchRequest, error: KVBusError) -> None:
        if one.is_repeated and self._is_followed:
            left_s = one.left_s(self._agent_wait_s)
            self._later(one, left_s, partial(self.refused, one, error), error)
        else:
            super().wait(one, error)

    def cancel(self, fetch: FetchRequest, release_offer: bool, done: Completion[None]) -> None:
        fetch.releases_offer = fetch.releases_offer or release_offer
        self.cancel_request(fetch, release_offer, done)

    def cancel_request(
        self, fetch: FetchRequest, release_offer: bool, done: Completion[None]
    ) -> None:
        """Cancel; if no agent has begun the fetch, its offer is not released."""
        fetch.is_cancelled = True
        is_away, is_waiting = fetch in self._away, self.remove(fetch)
        if is_away or is_waiting:
            self._end_cancelled(fetch, is_lost=is_away)
        is_refused = fetch.notice is not None and fetch.notice.stage == REQUESTED
        connection = fetch.connection
        if (
            connection is None
            or connection.lost is not None
            or is_waiting
            or (is_refused and fetch.is_free)
        ):  # no agent knows of it
            self._release_offer(fetch)
            done.settle(None)
            return

        def answer(reply: Empty | KVBusError) -> None:
            was_refused = fetch.notice is not None and fetch.notice.stage == REQUESTED
            is_ended = was_refused or isinstance(reply, PeerLost)  # `on_lost` ends it
            done.settle(reply if isinstance(reply, KVBusError) and not is_ended else None)

        try:
            connection.send(CancelFetch(fetch.fetch_id, release_offer), answer)
        except KVBusError as error:
            done.settle(error)

    def opened(self, connection: Connection) -> None:
        super().opened(connection)
        self.holds.opened(connection)
        self.releases.begin()

    def on_notice(self, notice: Notice) -> None:
        if notice.op == Landed.op:
            landed = from_body(Landed, notice.body)
            fetch = self._fetches.get(landed.fetch_id)
            if fetch is not None and fetch.on_landed is not None:
                fetch.on_landed(landed.num_tokens)
        elif notice.op == BlocksFreed.op:
            self._free(from_body(BlocksFreed, notice.body).fetch_id)

    def give_up(self, now: float, error: KVBusError) -> None:
        for fetch in list(self._fetches.values()):
            if fetch.notice is None and now >= fetch.retry_until:
                fetch.end(failed(fetch, error, stage="silent", blocks_free=False))

    # A lost agent's fetch is repeated: two agents write into the same blocks, but not at the same
    # time. A process of agent 1 may outlive the one that the link knows.
    #
    #     agent 1    reads ──────┤ SIGKILL ····· reads on ┤
    #     lifeline   ────────────────────────────────────┤ end-of-file
    #     agent 2            starts, registers the memory │     committed? no   reads ─┤ commit
    #     link       fetch ──────┤ lost: waits            └▶ fetch, repeated = 1        └▶ completed
    #     blocks     agent 1's ──────────────────────────┤  agent 2's ────────────────┤ the engine's
    #
    # The end-of-file separates the two agents. It also separates agent 1 from the next owner of the
    # blocks, if the engine cancels the fetch or its time ends without an agent. Then the link
    # reports the end immediately, and the blocks at the end-of-file.
    #
    # Agent 2 reads everything again, unless agent 1 has committed and so written everything. A
    # commit of agent 1 may still be in a socket. It is refused after the `CommitQuery` of agent 2,
    # so it cannot free the blocks that agent 2 reads.
    #
    # Other agents write into their own ranks. They cancel the reads of an earlier home before agent
    # 2 starts (`CancelPart`). Without agent 2, those blocks stay in doubt.
    def on_lost(self, error: KVBusError) -> None:
        connection, fetches = self.connection, list(self._fetches.values())
        super().on_lost(error)
        self.holds.lost()
        self._fetches = {}
        if connection is None:
            return
        for fetch in fetches:
            self._away[fetch] = connection
            if fetch.notice is None and fetch.is_cancelled:
                self._end_cancelled(fetch, is_lost=True)
            if isinstance(error, ClosedError) or not self._is_followed:
                self._lose(fetch, error)
            elif fetch.notice is None:
                fail = partial(self._overdue, fetch, error)
                fetch.timer = asyncio.get_running_loop().call_later(
                    fetch.left_s(self._agent_wait_s), fail
                )
        connection.life.when_ended(partial(self._on_agent_ended, connection, error))

    def greeted(self, connection: Connection) -> None:
        """Give up fetches of an agent that closed the connection and lives on."""
        boot = connection.agent.agent_boot
        for fetch, earlier in list(self._away.items()):
            if earlier.lost is not None and earlier.agent.agent_boot == boot:
                self._lose(fetch, earlier.lost)

    def closed(self) -> None:
        super().closed()
        self.holds.closed()
        for fetch, connection in list(self._away.items()):
            self._lose(fetch, ClosedError("the link was closed"))
            connection.life.close()

    def _on_agent_ended(self, connection: Connection, error: KVBusError) -> None:
        for fetch in [one for one, earlier in self._away.items() if earlier is connection]:
            self._remove_away(fetch)
            if fetch.notice is not None:
                fetch.free(error if self._has_remote_ranks else None)
                continue
            fetch.repeat()
            if self.connection is None:
                self.wait(fetch, error)
            else:
                self._resubmit(fetch)

    def _overdue(self, fetch: FetchRequest, error: KVBusError) -> None:
        fetch.end(failed(fetch, error, stage=LOST, blocks_free=False))

    def _lose(self, fetch: FetchRequest, error: KVBusError) -> None:
        self._remove_away(fetch)
        fetch.end(failed(fetch, error, stage=LOST, blocks_free=False))
        fetch.free(error)

    def _remove_away(self, fetch: FetchRequest) -> None:
        self._away.pop(fetch, None)
        if fetch.timer is not None:
            fetch.timer.cancel()

    def _end_cancelled(self, fetch: FetchRequest, *, is_lost: bool) -> None:
        """End a fetch that no agent knows, or that ends with its agent."""
        error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
        ended = failed(fetch, error, stage=LOST if is_lost or fetch.is_repeated else REQUESTED)
        self._end(fetch, replace(ended, outcome=Outcome.CANCELLED), error)

    def _end(self, fetch: FetchRequest, ended: Fetched, error: KVBusError) -> None:
        is_unconfirmed = fetch.is_repeated and self._has_remote_ranks
        is_known = fetch in self._away or self._fetches.get(fetch.fetch_id) is fetch
        fetch.end(replace(ended, blocks_free=not (is_unconfirmed or is_known)))
        if is_unconfirmed and not is_known:
            fetch.free(error)
        self._release_offer(fetch)

    def _release_offer(self, fetch: FetchRequest) -> None:
        is_committed = fetch.notice is not None and fetch.notice.outcome is Outcome.COMPLETED
        if fetch.releases_offer and not is_committed:
            fetch.releases_offer = False
            self.releases.add(dict(fetch.message.ticket))

    def _free(self, fetch_id: str) -> None:
        fetch = self._fetches.pop(fetch_id, None)
        if fetch is not None:
            fetch.free()


class _Releases:
    """Tickets to release: they queue for an agent, and few run at a time."""

    def __init__(self, fetches: Fetches, logger: logging.Logger) -> None:
        self._fetches, self._logger = fetches, logger
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_RELEASES)
        self._num_under_way = 0

    def add(self, ticket: dict[str, Any]) -> None:
        """Queue, in any thread, also before the link is open."""
        self._waiting.append(ticket)
        with suppress(ClosedError):
            self._fetches.runner.post(self.begin)

    # A fetch of no tokens completes a sealed offer. An offer that is never sealed or made would
    # keep it waiting: then the fetch is cancelled, which withdraws the offer.
    def begin(self) -> None:
        fetches = self._fetches
        while (
            fetches.connection is not None
            and self._waiting
            and self._num_under_way < MAX_RELEASES_AT_ONCE
        ):
            ticket = self._waiting.popleft()
            num_tokens = ticket.get("num_tokens", 0)
            stop = num_tokens if isinstance(num_tokens, int) else 0  # others are refused
            fetch = fetches.new(ticket, num_tokens=stop, first_token=stop, block_ids={})
            self._num_under_way += 1
            fetch.ended.then(partial(self._on_ended, ticket, fetch))
            fetches.submit(fetch)
            if Rendezvous.is_one(ticket):
                self._give_up(fetch)
            else:
                asyncio.get_running_loop().call_later(RELEASE_WITHIN_S, self._give_up, fetch)

    def _give_up(self, fetch: FetchRequest) -> None:
        if fetch.notice is None:  # otherwise it was released, or is queued again
            self._fetches.cancel_request(fetch, True, Completion())

    def _on_ended(self, ticket: dict[str, Any], fetch: FetchRequest) -> None:
        self._num_under_way -= 1
        notice = fetch.notice
        was_not_begun = notice is not None and notice.stage == REQUESTED
        if (
            notice is None
            or notice.stage == LOST
            or notice.code in AGENT_ENDED
            or (was_not_begun and notice.outcome is Outcome.CANCELLED)
        ):
            self._waiting.append(ticket)
            if self._fetches.connection is None:
                return
            if self._fetches.connection is fetch.connection:
                asyncio.get_running_loop().call_later(RELEASE_PAUSE_S, self.begin)
                return
        elif notice.outcome is Outcome.FAILED:
            self._logger.info(
                "kvbus: the offer of request %r, which is not wanted, was not released: %s [%s]",
                ticket.get("request_id"),
                notice.message,
                notice.code,
            )
        self.begin()


def failed(
    fetch: FetchRequest, error: KVBusError, *, stage: str, blocks_free: bool = True
) -> Fetched:
    return Fetched(
        fetch_id=fetch.fetch_id,
        request_id="",
        outcome=Outcome.FAILED,
        stage=stage,
        blocks_free=blocks_free,
        code=error.code.value,
        message=error.message,
    )


def failure_of(fetched: Fetched) -> FetchFailed:
    """Convert to an error; unknown codes become ``internal``."""
    is_known = fetched.code in ErrorCode._value2member_map_
    return FetchFailed(
        fetched.message,
        code=ErrorCode(fetched.code) if is_known else ErrorCode.INTERNAL,
        stage=fetched.stage,
        blocks_free=fetched.blocks_free,
        fetch_id=fetched.fetch_id,
    )
