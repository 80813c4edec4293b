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

from kvbus.engine.asking import Asking, Pending
from kvbus.engine.connection import Connection
from kvbus.engine.later import Later, Runner
from kvbus.engine.offers import BlockIds, check_groups
from kvbus.errors import (
    AgentHungUp,
    ClosedError,
    ErrorCode,
    FetchFailed,
    GeometryError,
    KVBusError,
    LocalError,
    PeerLost,
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
DOUBT_S = 8.0
"""More than an agent waits for transfers when it stops."""
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
    refusal by the agent (stage ``requested``) and when the agent ended first (stage ``lost``).

    ``freed`` follows, or comes with it: nothing can write into the blocks any more. It comes, too,
    when the agent is gone. But if other agents have ranks of this engine, or the agent only hung
    up, or the link was closed from here, somebody may still write, and nobody will say when that is
    over: then it raises why the connection ended (`PeerLost`, `AgentHungUp`, `ClosedError`). Do not
    use the blocks again; close the engine's links and register new memory.
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

    def renew(self) -> None:
        """It has less time left than it had when it was asked for first."""
        if self.message.timeout_s is not None:
            left_s = max(1e-3, self.ask_until - time.monotonic())
            self.message = replace(self.message, timeout_s=left_s)

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
        """Those that an agent may know of, until their blocks are free."""

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
        blocks_free = one.fetch_id not in self._fetches
        one.end(failed(one, error, stage=REQUESTED, blocks_free=blocks_free))

    def cancel(self, fetch: Fetch, release_offer: bool, done: Later[None]) -> None:
        if self.forget(fetch):
            error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
            ended = failed(fetch, error, stage=REQUESTED, blocks_free=True)
            fetch.end(replace(ended, outcome=Outcome.CANCELLED))
        is_refused = fetch.notice is not None and fetch.notice.stage == REQUESTED
        is_taken = fetch.notice is not None and fetch.notice.outcome is Outcome.COMPLETED
        connection = fetch.connection
        if (
            connection is None
            or connection.lost is not None
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

    def ends_within_s(self) -> float:
        """An agent that stops waits for its transfers; their blocks are free when it is gone."""
        return DOUBT_S if self._fetches else super().ends_within_s()

    def on_lost(self, error: KVBusError) -> None:
        """A process that is gone does not write; other agents, or one that only lost us, may."""
        is_left = self.connection is not None and self.connection.is_left
        super().on_lost(error)
        fetches, self._fetches = self._fetches, {}
        is_gone = isinstance(error, PeerLost) and not isinstance(error, AgentHungUp)
        blocks_free = is_gone and not self._has_others
        for fetch in fetches.values():
            if fetch.notice is None and is_left:
                self.wait(fetch, error)
                continue
            if fetch.notice is None:
                fetch.end(failed(fetch, error, stage="lost", blocks_free=blocks_free))
            fetch.free(None if blocks_free else error)

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
        if notice is None or notice.stage == "lost" or notice.code in AGENT_ENDED:
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


def failed(fetch: Fetch, error: KVBusError, *, stage: str, blocks_free: bool) -> Fetched:
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
