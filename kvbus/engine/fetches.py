"""The fetches of a decode engine, and when their blocks may be used or reused.

KV is valid when the agent says ``completed``, and not before; blocks are free when nothing can
write into them any more.
"""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypedDict, Unpack

import numpy as np
from msgspec.structs import replace

from kvbus.bus import new_secret
from kvbus.engine.asking import Asking, Pending
from kvbus.engine.connection import Connection
from kvbus.engine.later import Later, Runner
from kvbus.engine.offers import BlockIds, check_groups
from kvbus.errors import (
    ClosedError,
    ErrorCode,
    FetchFailed,
    GeometryError,
    KVBusError,
    LocalError,
    RequestRefused,
)
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.protocol.engine import BlocksFreed, CancelFetch, Fetched, Landed, Outcome, StartFetch
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, from_body
from kvbus.protocol.ticket import Rendezvous
from kvbus.protocol.tools import known_trace

REQUESTED = "requested"
"""The stage of a fetch that the agent did not begin."""
LOST = "lost"
"""The stage of a fetch whose agent was lost; no agent came back in time."""
MAX_RELEASES_AT_ONCE = 8
MAX_RELEASES = 4096
RELEASE_WITHIN_S = 10.0
AGENT_ENDED = (ErrorCode.DRAINING, ErrorCode.CLOSED, ErrorCode.PEER_LOST)

OnLanded = Callable[[int], None]


class FetchOptions(TypedDict, total=False):
    """What a fetch can be told besides its ticket, tokens and blocks."""

    first_token: int
    """The first token that is wanted, when those before it are there: 0 by default."""
    timeout_s: float | None
    """Seconds until it has ended; None lets the agent choose."""
    zero_tail: bool
    """Zero the unused slots of the last block, which else stay as they were."""
    chunk_tokens: int
    """Read in chunks that end at multiples of it, and tell ``on_landed`` of each."""
    on_landed: OnLanded | None
    """Called with the end of each chunk that is in the blocks, though valid only with the end."""
    fetch_id: str | None
    """A name that the engine has never used before; one is made when there is none."""
    prompt_digest: str
    """The ticket must be of a prompt with this one, see `prompt_digest`."""
    priority: int
    """Of fetches that wait for each other, those of a greater one come first, though never alone:
    the others go on more slowly."""
    traceparent: str
    """The trace that the request belongs to; that of the ticket when there is none."""
    wanted_s: float | None
    """For spans: since when, by `time.monotonic`, the engine has had the request, which waited for
    its turn."""


class Fetch(Pending[StartFetch]):
    """One fetch of a decode engine; its calls return at once, in any thread.

    ``ended`` says success: the KV is in the blocks, and valid. It raises `FetchFailed`, also for a
    refusal by the agent (stage ``requested``).

    A fetch survives its agent: the link repeats it with the next one, in the time that is left. It
    fails with stage ``lost`` when no agent comes back in that time, when the link is closed, and
    when the agent lives on but has ended the connection.

    ``freed`` follows, or comes with it: nothing can write into the blocks any more. After the loss
    of the agent, it comes when all processes of that agent have ended. It raises why the connection
    ended (`PeerLost`, `AgentHungUp`, `ClosedError`) when the blocks stay in doubt: other agents may
    have ranks of this engine, the agent lives on, or the link was closed. Do not use the blocks
    again; close the engine's links and register new memory.
    """

    def __init__(
        self,
        fetches: "Fetches",
        message: StartFetch,
        on_landed: OnLanded | None,
        overdue_s: float,
    ) -> None:
        """``overdue_s`` is for how long an agent that answers nothing is waited for."""
        super().__init__(message, time.monotonic() + overdue_s)
        self.fetch_id, self.on_landed = message.fetch_id, on_landed
        self.ended: Later[Fetched] = Later(fetches.runner)
        self.freed: Later[None] = Later(fetches.runner)
        self.connection: Connection | None = None
        """With the agent that may know of it."""
        self._fetches = fetches
        self.timer: asyncio.TimerHandle | None = None
        """Ends it if no agent comes back in time."""
        self.notice: Fetched | None = None
        """How it ended, None before that. Its stage is ``lost`` when its agent ended first,
        ``silent`` when its agent is stopped."""

    @property
    def are_blocks_free(self) -> bool:
        """Whether no agent can write into the blocks.

        When `Link.ended` has reported the fetch before that, this changes with its next report.
        """
        is_free = self.freed.done() and self.freed.exception() is None
        return is_free and not (self.awaits_report and not self.is_observed)

    def cancel(self, *, release_offer: bool = False) -> Later[None]:
        """Give up; `ended` raises with code ``cancelled``, unless it had ended before.

        With ``release_offer`` nobody will fetch this ticket any more: the prefill engine gets its
        blocks back now, and not when the offer expires. Also for a fetch that failed. What is
        returned need not be waited for.
        """
        done: Later[None] = Later(self._fetches.runner)
        self._fetches.runner.post(partial(self._fetches.cancel, self, release_offer, done))
        return done

    @property
    def is_repeated(self) -> bool:
        return self.message.repeated > 0

    def repeat(self) -> None:
        """Called by `Fetches`: the next agent gets it, as all processes of the last have ended."""
        self.message = replace(self.message, repeated=self.message.repeated + 1)

    def renew(self) -> None:
        """It has less time left than it had when it was asked for first."""
        if self.message.timeout_s is not None:
            left_s = max(1e-3, self.ask_until - time.monotonic())
            self.message = replace(self.message, timeout_s=left_s)

    def left_s(self, least_s: float) -> float:
        """Seconds until its deadline; one without a deadline has at least ``least_s``."""
        left_s = self.ask_until - time.monotonic()
        return max(0.0 if self.message.timeout_s is not None else least_s, left_s)

    def end(self, fetched: Fetched) -> None:
        """Called by `Fetches`: the fetch ended."""
        if self.notice is None:
            self.notice = fetched
            if fetched.blocks_free:
                self.freed.settle(None)
            is_good = fetched.outcome is Outcome.COMPLETED
            self.ended.settle(fetched if is_good else failure_of(fetched))
            self.on_end(self)

    def free(self, doubt: KVBusError | None = None) -> None:
        """Called by `Fetches`: its blocks are free, or nobody will say so, because of ``doubt``."""
        if not self.freed.done():
            self.freed.settle(doubt)
            if self.notice is not None:
                self.on_end(self)


class Fetches(Asking[Fetch]):
    """The fetches of one engine that its agents may know of, or will.

    ``has_others``: other agents write into blocks of this engine, too.
    """

    def __init__(
        self,
        runner: Runner,
        engine: EngineSpec,
        *,
        has_others: bool,
        patience_s: float,
        logger: logging.Logger,
        agent_wait_s: float = 10.0,
    ) -> None:
        super().__init__(agent_wait_s=agent_wait_s)
        self.runner, self._engine, self._has_others = runner, engine, has_others
        self._patience_s = patience_s
        self.releases = _Releases(self, logger)
        self._fetches: dict[str, Fetch] = {}
        """Those that the agent may know of, until their blocks are free."""
        self._away: dict[Fetch, Connection] = {}
        """Those that a lost agent may know of, until its last process has ended."""

    def new(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int | None,
        block_ids: BlockIds,
        **options: Unpack[FetchOptions],
    ) -> Fetch:
        """A fetch that is not asked for yet; copies the ids.

        Without ``timeout_s``, an agent that answers nothing is waited for ``patience_s``. Raises
        `GeometryError` as `Link.fetch` does; called in any thread.
        """
        at_most, first_token = num_tokens is None, options.get("first_token", 0)
        if num_tokens is None:
            num_tokens = _most_tokens(self._engine, block_ids, first_token)
        fields: dict[str, Any] = {**options}
        on_landed = fields.pop("on_landed", None)
        fields["fetch_id"] = fields.get("fetch_id") or uuid.uuid4().hex
        fields["traceparent"] = known_trace(fields.get("traceparent", ""))
        fields["token"] = new_secret()
        message = StartFetch(
            ticket=dict(ticket),
            num_tokens=num_tokens,
            tables=fetch_tables(self._engine, block_ids, first_token, num_tokens),
            at_most=at_most,
            asked_s=time.monotonic(),
            **fields,
        )
        return Fetch(self, message, on_landed, message.timeout_s or self._patience_s)

    def sent(self, one: Fetch, connection: Connection) -> None:
        """The agent may write into its blocks from now on."""
        one.connection = connection
        self._fetches[one.fetch_id] = one

    def answered(self, one: Fetch, reply: Fetched) -> None:
        if one.notice is not None:  # given up before: only its blocks count
            if reply.blocks_free:
                self._free(one.fetch_id)
            return
        if reply.blocks_free:
            self._fetches.pop(one.fetch_id, None)
        one.end(reply)

    def on_refusal(self, connection: Connection, one: Fetch, error: KVBusError) -> None:
        """Without a clear no, the agent may have taken it: its blocks stay in doubt."""
        if connection.lost is not None:
            return  # `on_lost` ends it
        if isinstance(error, RequestRefused):
            self._fetches.pop(one.fetch_id, None)
            if one.notice is not None:
                one.free()
                return
        super().on_refusal(connection, one, error)

    def refused(self, one: Fetch, error: KVBusError) -> None:
        """Its blocks are free, unless an agent may know of it."""
        is_lost = one.is_repeated and not isinstance(error, RequestRefused)
        self._end(one, failed(one, error, stage=LOST if is_lost else REQUESTED), error)

    def wait(self, one: Fetch, error: KVBusError) -> None:
        """A fetch that an agent has begun waits for the next one as long as it has time."""
        if one.is_repeated and self._is_followed:
            left_s = one.left_s(self._agent_wait_s)
            self._later(one, left_s, partial(self.refused, one, error), error)
        else:
            super().wait(one, error)

    def cancel(self, fetch: Fetch, release_offer: bool, done: Later[None]) -> None:
        is_away, is_waiting = fetch in self._away, self.forget(fetch)
        if is_away or is_waiting:
            error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
            ended = failed(fetch, error, stage=LOST if is_away or fetch.is_repeated else REQUESTED)
            self._end(fetch, replace(ended, outcome=Outcome.CANCELLED), error)
        is_refused = fetch.notice is not None and fetch.notice.stage == REQUESTED
        is_taken = fetch.notice is not None and fetch.notice.outcome is Outcome.COMPLETED
        connection = fetch.connection
        if (
            connection is None
            or connection.lost is not None
            or is_waiting
            or (is_refused and fetch.are_blocks_free)
        ):  # no agent knows of it
            if release_offer and not is_taken:
                self.releases.add(dict(fetch.message.ticket))
            done.settle(None)
            return

        def answer(reply: Empty | KVBusError) -> None:
            done.settle(reply if isinstance(reply, KVBusError) else None)

        try:
            connection.send(CancelFetch(fetch.fetch_id, release_offer), answer)
        except KVBusError as error:
            done.settle(error)

    def opened(self, connection: Connection) -> None:
        super().opened(connection)
        self.releases.begin()

    def on_notice(self, notice: Notice) -> None:
        """Tokens are there, or blocks are free."""
        if notice.op == Landed.op:
            landed = from_body(Landed, notice.body)
            fetch = self._fetches.get(landed.fetch_id)
            if fetch is not None and fetch.on_landed is not None:
                fetch.on_landed(landed.num_tokens)
        elif notice.op == BlocksFreed.op:
            self._free(from_body(BlocksFreed, notice.body).fetch_id)

    def give_up(self, now: float, error: KVBusError) -> None:
        """As the others: its stage is ``silent``."""
        for fetch in list(self._fetches.values()):
            if fetch.notice is None and now >= fetch.ask_until:
                fetch.end(failed(fetch, error, stage="silent", blocks_free=False))

    # A fetch is repeated when its agent is lost, so two agents write into the same blocks, though
    # never at the same time (a process of agent 1 may outlive the one that the link knows):
    #
    #     agent 1    reads ──────┤ SIGKILL ····· reads on ┤
    #     lifeline   ────────────────────────────────────┤ end-of-file
    #     agent 2            starts, registers the memory │     committed? no   reads ─┤ commit
    #     link       fetch ──────┤ lost: waits            └▶ fetch, repeated = 1        └▶ completed
    #     blocks     agent 1's ──────────────────────────┤  agent 2's ────────────────┤ the engine's
    #
    # The end-of-file separates the two. So does it separate agent 1 from the next owner of the
    # blocks, if the engine cancels the fetch or its time ends while there is no agent: then the end
    # is reported at once, and the blocks at the end-of-file. What agent 1 wrote does not matter to
    # agent 2, which reads all of it again, unless agent 1 has committed: then it wrote everything.
    # A request of agent 1 may still be in a socket. A late commit of agent 1 is refused once agent
    # 2 has asked (`CommitQuery`), so it cannot free the blocks that agent 2 reads.
    #
    # Ranks at other agents are written by these. They end what an earlier home has asked for before
    # agent 2 goes on (`CancelPart`); without an agent 2 the blocks stay in doubt.
    def on_lost(self, error: KVBusError) -> None:
        """Keep what the agent may know of, for the next one."""
        connection, fetches = self.connection, list(self._fetches.values())
        super().on_lost(error)
        self._fetches = {}
        if connection is None:
            return
        for fetch in fetches:
            if isinstance(error, ClosedError) or not self._is_followed:
                self._lose(fetch, error)
            else:
                self._away[fetch] = connection
                if fetch.notice is None:
                    fail = partial(self._overdue, fetch, error)
                    fetch.timer = asyncio.get_running_loop().call_later(
                        fetch.left_s(self._agent_wait_s), fail
                    )
        connection.life.when_ended(partial(self._on_agent_ended, connection, error))

    def greeted(self, connection: Connection) -> None:
        """The agent at the path has said who it is: maybe the one that hung up, which lives on."""
        boot = connection.agent.agent_boot
        for fetch, earlier in list(self._away.items()):
            if earlier.lost is not None and earlier.agent.agent_boot == boot:
                self._lose(fetch, earlier.lost)

    def closed(self) -> None:
        super().closed()
        for fetch, connection in list(self._away.items()):
            self._lose(fetch, ClosedError("the link was closed"))
            connection.life.close()

    def _on_agent_ended(self, connection: Connection, error: KVBusError) -> None:
        """No process of a lost agent writes any more: repeat what it has not finished."""
        for fetch in [one for one, earlier in self._away.items() if earlier is connection]:
            self._forget_away(fetch)
            if fetch.notice is not None:
                fetch.free(error if self._has_others else None)
                continue
            fetch.repeat()
            if self.connection is None:
                self.wait(fetch, error)
            else:
                self._ask_again(fetch)

    def _overdue(self, fetch: Fetch, error: KVBusError) -> None:
        fetch.end(failed(fetch, error, stage=LOST, blocks_free=False))

    def _lose(self, fetch: Fetch, error: KVBusError) -> None:
        """Nobody will say when its blocks are free."""
        self._forget_away(fetch)
        fetch.end(failed(fetch, error, stage=LOST, blocks_free=False))
        fetch.free(error)

    def _forget_away(self, fetch: Fetch) -> None:
        self._away.pop(fetch, None)
        if fetch.timer is not None:
            fetch.timer.cancel()

    def _end(self, fetch: Fetch, ended: Fetched, error: KVBusError) -> None:
        """End it here. Its blocks are free, unless an agent may write into them."""
        is_in_doubt = fetch.is_repeated and self._has_others
        is_known = fetch in self._away or self._fetches.get(fetch.fetch_id) is fetch
        fetch.end(replace(ended, blocks_free=not (is_in_doubt or is_known)))
        if is_in_doubt and not is_known:
            fetch.free(error)

    def _free(self, fetch_id: str) -> None:
        fetch = self._fetches.pop(fetch_id, None)
        if fetch is not None:
            fetch.free()


class _Releases:
    """The tickets that one decode engine does not need.

    They wait while there is no agent, and for each other, so that fetches find it free.
    """

    def __init__(self, fetches: Fetches, logger: logging.Logger) -> None:
        self._fetches, self._logger = fetches, logger
        self._waiting: deque[dict[str, Any]] = deque(maxlen=MAX_RELEASES)
        self._num_under_way = 0

    def add(self, ticket: dict[str, Any]) -> None:
        """Release it in its turn; in any thread, also before the link is open."""
        self._waiting.append(ticket)
        with suppress(ClosedError):
            self._fetches.runner.post(self.begin)

    # A fetch of no tokens of a sealed offer takes it, and so completes it. Of one that is never
    # sealed, or never made, it would wait: that one is cancelled, which withdraws the offer.
    def begin(self) -> None:
        """Go on, as there is an agent, or room."""
        fetches = self._fetches
        while (
            fetches.connection is not None
            and self._waiting
            and self._num_under_way < MAX_RELEASES_AT_ONCE
        ):
            ticket = self._waiting.popleft()
            num_tokens = ticket.get("num_tokens", 0)
            stop = num_tokens if isinstance(num_tokens, int) else 0  # else the agent refuses it
            fetch = fetches.new(ticket, num_tokens=stop, first_token=stop, block_ids={})
            self._num_under_way += 1
            fetch.ended.then(partial(self._on_ended, ticket, fetch))
            fetches.ask(fetch)
            if Rendezvous.is_one(ticket):
                self._give_up(fetch)
            else:
                asyncio.get_running_loop().call_later(RELEASE_WITHIN_S, self._give_up, fetch)

    def _give_up(self, fetch: Fetch) -> None:
        if fetch.notice is None:  # else it has been released, or stands in line again
            self._fetches.cancel(fetch, True, Later())

    def _on_ended(self, ticket: dict[str, Any], fetch: Fetch) -> None:
        self._num_under_way -= 1
        notice = fetch.notice
        if notice is None or notice.stage == LOST or notice.code in AGENT_ENDED:
            self._waiting.append(ticket)  # the next agent does it
            if self._fetches.connection is fetch.connection:
                return
        elif notice.outcome is Outcome.FAILED:
            self._logger.info(
                "kvbus: the offer of request %r, which is not wanted, was not released: %s [%s]",
                ticket.get("request_id"),
                notice.message,
                notice.code,
            )
        self.begin()


def failed(fetch: Fetch, error: KVBusError, *, stage: str, blocks_free: bool = True) -> Fetched:
    """How a fetch ended that no agent has ended."""
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
    """The error that stands for it; an agent that is newer may have codes of its own."""
    is_known = fetched.code in ErrorCode._value2member_map_
    return FetchFailed(
        fetched.message,
        code=ErrorCode(fetched.code) if is_known else ErrorCode.INTERNAL,
        stage=fetched.stage,
        blocks_free=fetched.blocks_free,
        fetch_id=fetched.fetch_id,
    )


def _most_tokens(engine: EngineSpec, block_ids: BlockIds, first_token: int) -> int:
    """As many as there are blocks for, which begin with that of ``first_token``."""
    stops = [
        (first_token // group.block_size + np.size(block_ids[group.name])) * group.block_size
        for group in engine.groups
        if not group.state and group.name in block_ids
    ]
    if not stops:
        raise GeometryError("without num_tokens, give the blocks of a group", field="num_tokens")
    return min(stops)


def fetch_tables(
    engine: EngineSpec, block_ids: BlockIds, first_token: int, num_tokens: int
) -> dict[str, BlockTable]:
    """The tables of the groups that were given, or need none; raises `GeometryError`.

    What the agent shall refuse is left to it: a group that is needed and has no ids.
    """
    check_groups(engine, block_ids)
    tables = {}
    for group in engine.groups:
        start, stop = group.positions(first_token, num_tokens)
        if group.name in block_ids or start == stop:
            first = 0 if group.state else start // group.block_size
            tables[group.name] = BlockTable.of(block_ids.get(group.name, ()), first_block=first)
    return tables
