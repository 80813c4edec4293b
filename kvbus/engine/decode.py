"""The control session of a decode engine: fetches, and when their blocks may be used or reused.

KV is valid when the agent says ``completed``, and not before; blocks are free when nothing can
write into them any more.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import numpy as np
from msgspec.structs import replace

from kvbus.engine.control import BusyPauses, ControlSession
from kvbus.engine.later import Later, Runner
from kvbus.engine.prefill import BlockIds
from kvbus.engine.session import SessionOptions
from kvbus.errors import (
    AgentHungUp,
    ErrorCode,
    FetchFailed,
    GeometryError,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
    RequestTimeout,
)
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.protocol.engine import (
    AgentRole,
    BlocksFreed,
    CancelFetch,
    Fetched,
    Landed,
    Outcome,
    StartFetch,
)
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import Empty, from_body
from kvbus.protocol.trace import known_trace

REQUESTED = "requested"
"""The stage of a fetch that the agent did not begin."""
SILENT_S = 5.0
DOUBT_S = 8.0
"""More than an agent waits for transfers when it stops."""

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
    asked_s: float | None
    """For spans: when the engine asked for this, if that was not now."""


class Fetch:
    """One fetch of a decode engine; its calls return at once, in any thread.

    ``ended`` says success: the KV is in the blocks, and valid. It raises `FetchFailed`, also for a
    refusal by the agent (stage ``requested``) and when the session ended first (stage ``lost``).

    ``freed`` follows, or comes with it: nothing can write into the blocks any more. It comes, too,
    when the agent is gone. But if other agents have ranks of this engine, or the agent only hung
    up, or the link was closed from here, somebody may still write, and nobody will say when that is
    over: then it raises why the session ended (`PeerLost`, `AgentHungUp`, `ClosedError`). Do not
    use the blocks again; close the engine's links and register new memory.
    """

    def __init__(
        self, runner: Runner, message: StartFetch, on_landed: OnLanded | None, overdue_s: float
    ) -> None:
        """``overdue_s`` is for how long an agent that answers nothing is waited for."""
        self.fetch_id, self.message, self.on_landed = message.fetch_id, message, on_landed
        self.ended: Later[Fetched] = Later()
        self.freed: Later[None] = Later()
        self.overdue_at = time.monotonic() + overdue_s
        self.pauses = BusyPauses(self.overdue_at)
        self.session: DecodeSession | None = None
        self.give_up: Callable[[], None] | None = None
        """Ends it here; set by the session while the agent is too busy for it and knows nothing."""
        self.release: Callable[[], None] | None = None
        """Has its ticket released by another way than its own; set by the link."""
        self._runner = runner
        self._notice: Fetched | None = None

    @property
    def notice(self) -> Fetched | None:
        """How it ended, None before that.

        Its stage is ``lost`` when its session ended first, ``silent`` when its agent is stopped.
        """
        return self._notice

    @property
    def are_blocks_free(self) -> bool:
        """Whether nothing can write into the blocks any more."""
        return self.freed.done() and self.freed.exception() is None

    def cancel(self, *, release_offer: bool = False) -> Later[None]:
        """Give up; `ended` raises with code ``cancelled``, unless it had ended before.

        With ``release_offer`` nobody will fetch this ticket any more: the prefill engine gets its
        blocks back now, and not when the offer expires. Also for a fetch that failed. What is
        returned need not be waited for.
        """
        done: Later[None] = Later()
        self._runner.post(partial(self._cancel, done, release_offer))
        return done

    def _cancel(self, done: Later[None], release_offer: bool) -> None:
        def answer(reply: Empty | KVBusError) -> None:
            done.settle(reply if isinstance(reply, KVBusError) else None)

        refused = (
            self.are_blocks_free and self.notice is not None and self.notice.stage == REQUESTED
        )
        if self.give_up is not None or self.session is None or refused:
            if self.give_up is not None:
                self.give_up()
            if release_offer and self.release is not None:  # the agent knows nothing of it
                self.release()
            done.settle(None)
        else:
            try:
                self.session.send(CancelFetch(self.fetch_id, release_offer), answer)
            except KVBusError as error:
                done.settle(error)

    def end(self, fetched: Fetched) -> None:
        """Called by the session: the fetch ended."""
        if self._notice is None:
            self._notice = fetched
            if fetched.blocks_free:
                self.freed.settle(None)
            is_good = fetched.outcome is Outcome.COMPLETED
            self.ended.settle(fetched if is_good else failure_of(fetched))


class DecodeSession(ControlSession):
    """Registers a decode engine and fetches the KV of its requests."""

    serves = AgentRole.DECODE

    def __init__(
        self, attach_path: str | Path, engine: EngineSpec, **options: Unpack[SessionOptions]
    ) -> None:
        super().__init__(attach_path, engine, **options)
        self._fetches: dict[str, Fetch] = {}
        self._asked: dict[str, Fetch] = {}
        """Those that have no answer."""
        self._was_silent = False

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int | None = None,
        block_ids: BlockIds,
        **options: Unpack[FetchOptions],
    ) -> Fetch:
        """As `Link.fetch`; raises why the session ended when it did."""
        fetch = new_fetch(
            self.runner,
            self.engine,
            ticket,
            num_tokens=num_tokens,
            block_ids=block_ids,
            patience_s=self.request_timeout_s,
            **options,
        )
        self.begin(fetch)
        return fetch

    def begin(self, fetch: Fetch) -> None:
        """Ask for it; where it is kept and lost, ask the session that follows.

        Raises why the session ended.
        """
        if self.lost is not None and self.is_kept:
            self._put_off(fetch, self.lost)
        else:
            self._ask(fetch)
            self._fetches[fetch.fetch_id] = fetch

    def _ask(self, fetch: Fetch) -> None:
        fetch.session = self
        self.send(fetch.message, partial(self._on_answer, fetch), timeout_s=math.inf)
        self._asked[fetch.fetch_id] = fetch

    def _on_answer(self, fetch: Fetch, reply: Fetched | KVBusError) -> None:
        """Without a clear no, the agent may have taken the fetch: its blocks stay in doubt."""
        if self.lost is None:
            self._asked.pop(fetch.fetch_id, None)
        if isinstance(reply, Fetched):
            self._end(reply)
            return
        if self.lost is not None:
            return
        if self.may_be_asked_next(reply):
            self._put_off(fetch, reply)
            return
        pause_s = fetch.pauses.after(reply, time.monotonic()) if self.retry_busy else None
        if pause_s is not None and fetch.notice is None:
            asyncio.get_running_loop().call_later(pause_s, self._ask_again, fetch)
            fetch.give_up = partial(self._give_up, fetch)
            self._asked[fetch.fetch_id] = fetch
            return
        refused = isinstance(reply, RequestRefused)
        self._end(failed(fetch, reply, stage=REQUESTED, blocks_free=refused))

    def _ask_again(self, fetch: Fetch) -> None:
        fetch.give_up = None
        if fetch.notice is not None or self.lost is not None:
            return
        if fetch.message.timeout_s is not None:
            left_s = max(1e-3, fetch.overdue_at - time.monotonic())
            fetch.message = replace(fetch.message, timeout_s=left_s)
        try:
            self._ask(fetch)
        except KVBusError as error:
            self._end(failed(fetch, error, stage=REQUESTED, blocks_free=True))

    # Until the next agent is there nobody has begun the fetch: its blocks are the engine's.
    def _put_off(self, fetch: Fetch, error: KVBusError) -> None:
        self._fetches.pop(fetch.fetch_id, None)
        fetch.give_up = partial(self._give_up, fetch)

        def go_on(session: DecodeSession | None) -> None:
            if fetch.notice is not None:
                return
            if session is not None:
                session._take_over(fetch)
                return
            self._fetches[fetch.fetch_id] = fetch
            self._end(failed(fetch, error, stage=REQUESTED, blocks_free=True))

        self.when_followed(go_on)

    def _take_over(self, fetch: Fetch) -> None:
        """The agent of the session before this one did not begin the fetch."""
        if self.lost is not None:
            self._put_off(fetch, self.lost)
            return
        self._fetches[fetch.fetch_id] = fetch
        self._ask_again(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        """The agent knows nothing of the fetch: it ends here, once."""
        if fetch.notice is not None:
            return
        self._asked.pop(fetch.fetch_id, None)
        error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
        self._fetches[fetch.fetch_id] = fetch
        ended = failed(fetch, error, stage=REQUESTED, blocks_free=True)
        self._end(replace(ended, outcome=Outcome.CANCELLED))

    def _on_notice(self, notice: Notice) -> None:
        if notice.op == Landed.op:
            self._land(from_body(Landed, notice.body))
        elif notice.op == BlocksFreed.op:
            self._free(from_body(BlocksFreed, notice.body))

    def _land(self, landed: Landed) -> None:
        fetch = self._fetches.get(landed.fetch_id)
        if fetch is not None and fetch.on_landed is not None:
            fetch.on_landed(landed.num_tokens)

    # An agent keeps the deadlines of its fetches itself, unless it is stopped: then nobody does. It
    # is given up when it was silent twice in a row, so that a process that was held up itself reads
    # what came meanwhile. Whether such a fetch has completed, and whether something is written yet,
    # nobody knows: its blocks are free when the agent says so after all, or is gone.
    def _on_silence(self, silent_s: float) -> None:
        was_silent, self._was_silent = self._was_silent, silent_s >= SILENT_S
        if not (was_silent and self._was_silent):
            return
        now = time.monotonic()
        problem = f"the agent has answered nothing for {silent_s:.0f} s: how it ended is not known"
        error = RequestTimeout(problem)
        for fetch in list(self._fetches.values()):
            if fetch.notice is None and now >= fetch.overdue_at:
                self._end(failed(fetch, error, stage="silent", blocks_free=False))

    def _end(self, fetched: Fetched) -> None:
        fetch = self._fetches.get(fetched.fetch_id)
        if fetch is not None and fetch.notice is not None:  # given up before: only its blocks count
            if fetched.blocks_free:
                self._free(BlocksFreed(fetched.fetch_id))
            return
        if fetched.blocks_free:
            self._fetches.pop(fetched.fetch_id, None)
        if fetch is not None:
            fetch.end(fetched)

    def _free(self, freed: BlocksFreed) -> None:
        fetch = self._fetches.pop(freed.fetch_id, None)
        if fetch is not None:
            fetch.freed.settle(None)

    def _ends_within_s(self) -> float:
        """An agent that stops waits for its transfers; their blocks are free when it is gone."""
        return DOUBT_S if self._fetches else super()._ends_within_s()

    def _on_lost(self, error: KVBusError) -> None:
        """A process that is gone does not write; other agents, or one that only lost us, may."""
        if self.is_left and self.is_kept:
            for fetch in [one for one in self._asked.values() if one.notice is None]:
                self._put_off(fetch, error)
        is_gone = isinstance(error, PeerLost) and not isinstance(error, AgentHungUp)
        blocks_free = is_gone and not self.others
        for fetch in list(self._fetches.values()):
            if fetch.notice is None:
                self._end(failed(fetch, error, stage="lost", blocks_free=blocks_free))
            fetch.freed.settle(None if blocks_free else error)
        self._fetches.clear()


def new_fetch(
    runner: Runner,
    engine: EngineSpec,
    ticket: Mapping[str, Any],
    *,
    num_tokens: int | None,
    block_ids: BlockIds,
    patience_s: float,
    first_token: int = 0,
    timeout_s: float | None = None,
    zero_tail: bool = False,
    chunk_tokens: int = 0,
    on_landed: OnLanded | None = None,
    fetch_id: str | None = None,
    prompt_digest: str = "",
    priority: int = 0,
    traceparent: str = "",
    asked_s: float | None = None,
    wanted_s: float | None = None,
) -> Fetch:
    """A fetch that nobody has asked for yet; copies the ids.

    Without ``timeout_s``, an agent that answers nothing is waited for ``patience_s``. Raises
    `GeometryError` as `Link.fetch` does.
    """
    at_most = num_tokens is None
    if num_tokens is None:
        num_tokens = _most_tokens(engine, block_ids, first_token)
    message = StartFetch(
        fetch_id=fetch_id or uuid.uuid4().hex,
        ticket=dict(ticket),
        num_tokens=num_tokens,
        tables=fetch_tables(engine, block_ids, first_token, num_tokens),
        first_token=first_token,
        timeout_s=timeout_s,
        zero_tail=zero_tail,
        chunk_tokens=chunk_tokens,
        prompt_digest=prompt_digest,
        priority=priority,
        traceparent=known_trace(traceparent),
        asked_s=time.monotonic() if asked_s is None else asked_s,
        wanted_s=wanted_s,
        at_most=at_most,
    )
    return Fetch(runner, message, on_landed, timeout_s or patience_s)


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
    if unknown := sorted(block_ids.keys() - {group.name for group in engine.groups}):
        raise GeometryError(f"the engine has no group {', '.join(unknown)}", field="block_ids")
    tables = {}
    for group in engine.groups:
        start, stop = group.positions(first_token, num_tokens)
        if group.name in block_ids or start == stop:
            first = 0 if group.state else start // group.block_size
            tables[group.name] = BlockTable.of(block_ids.get(group.name, ()), first_block=first)
    return tables
