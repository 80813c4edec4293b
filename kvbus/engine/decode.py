"""The control session of a decode engine: fetches, and when their blocks may be used or reused.

Refuses to call KV valid before the agent says ``completed``, and blocks free while anything may
write into them.
"""

import asyncio
import math
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Unpack

import numpy.typing as npt
from msgspec.structs import replace

from kvbus.engine.busy import BusyPauses
from kvbus.engine.control import ControlSession
from kvbus.engine.fetch import Fetch, OnFetched, OnLanded
from kvbus.engine.session import Latch, SessionOptions
from kvbus.errors import (
    AgentHungUp,
    ErrorCode,
    GeometryError,
    KVBusError,
    LocalError,
    PeerLost,
    RequestRefused,
    RequestTimeout,
)
from kvbus.geometry import BlockTable, EngineSpec
from kvbus.protocol.engine import AgentRole, BlocksFreed, Fetched, Landed, Outcome, StartFetch
from kvbus.protocol.envelope import Notice
from kvbus.protocol.message import from_body
from kvbus.protocol.trace import known_trace

SILENT_S = 5.0
DOUBT_S = 8.0
"""More than an agent waits for transfers when it stops."""

BlockIds = Mapping[str, npt.ArrayLike]
OnBlocksFreed = Callable[[BlocksFreed], None]


class _Asked(NamedTuple):
    """What is asked for a fetch until the agent takes it."""

    message: StartFetch
    fetch: Fetch
    pauses: BusyPauses


class DecodeSession(ControlSession):
    """Registers a decode engine and fetches the KV of its requests.

    The callbacks are for engines that do not wait for each fetch; those that are left when the
    session ends have failed with stage ``lost``. They are not told of fetches that are observed one
    by one, see `Fetch.when_ended`.
    """

    serves = AgentRole.DECODE

    def __init__(
        self,
        attach_path: str | Path,
        engine: EngineSpec,
        *,
        on_fetched: OnFetched | None = None,
        on_blocks_freed: OnBlocksFreed | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(attach_path, engine, **options)
        self._on_fetched, self._on_blocks_freed = on_fetched, on_blocks_freed
        self._fetches: dict[str, Fetch] = {}
        self._asked: dict[str, _Asked] = {}
        """Those that have no answer."""
        self._was_silent = False

    def fetch(
        self,
        ticket: Mapping[str, Any],
        *,
        num_tokens: int,
        block_ids: BlockIds,
        first_token: int = 0,
        timeout_s: float | None = None,
        zero_tail: bool = False,
        piece_tokens: int = 0,
        on_landed: OnLanded | None = None,
        fetch_id: str | None = None,
        prompt_digest: str = "",
        priority: int = 0,
        traceparent: str = "",
        asked_s: float | None = None,
        wanted_s: float | None = None,
    ) -> Fetch:
        """Ask for tokens [first_token, num_tokens) into ``block_ids`` (by group, by position).

        Each group gives exactly the blocks of its `GroupSpec.positions`: of these tokens; with a
        window, of those among the last ``window`` of ``num_tokens``; of a state, its one block. A
        group that needs none may be left out. ``zero_tail`` zeroes the unused slots of the last
        block, which else stay as they were. With ``piece_tokens`` the tokens are read in pieces
        that end at multiples of it, and ``on_landed`` is called with the end of each when it is in
        the blocks, though valid only with the completion. ``fetch_id`` is one that the engine has
        never used before; one is made when there is none. With ``prompt_digest`` the ticket must be
        of a prompt with that digest. Of fetches that wait for each other, those of a greater
        ``priority`` come first, though never alone: the others go on more slowly. ``traceparent``
        is the trace that the request belongs to; that of the ticket when there is none. For spans,
        ``asked_s`` is when the engine asked for this, by `time.monotonic`: now, unless this is
        called in another thread, later. ``wanted_s`` is since when it has had the request, which
        waited for its turn.

        Returns at once; `Fetch.completed` says how it ends, a refusal by the agent included (its
        stage is ``requested``). An agent without room is asked again until ``timeout_s`` or
        ``request_timeout_s`` have passed, see `EngineSession`. An agent that
        answers nothing any more cannot say so: the fetch fails then with stage ``silent``, after
        ``timeout_s`` or ``request_timeout_s``.
        Raises `GeometryError` for ids that are none or of no group, and why the session ended when
        it did.
        """
        now = time.monotonic()
        tables = fetch_tables(self.engine, block_ids, first_token, num_tokens)
        overdue_at = now + (timeout_s or self.request_timeout_s)
        fetch = Fetch(self, fetch_id or uuid.uuid4().hex, on_landed, overdue_at=overdue_at)
        message = StartFetch(
            fetch_id=fetch.fetch_id,
            ticket=dict(ticket),
            num_tokens=num_tokens,
            tables=tables,
            first_token=first_token,
            timeout_s=timeout_s,
            zero_tail=zero_tail,
            chunk_tokens=piece_tokens,
            prompt_digest=prompt_digest,
            priority=priority,
            traceparent=known_trace(traceparent),
            asked_s=now if asked_s is None else asked_s,
            wanted_s=wanted_s,
        )
        asked = _Asked(message, fetch, BusyPauses(overdue_at))
        if self.lost is not None and self.is_kept:
            self._put_off(asked, self.lost)
        else:
            self._ask(asked)
            self._fetches[fetch.fetch_id] = fetch
        return fetch

    def _ask(self, asked: _Asked) -> None:
        self.send(asked.message, partial(self._on_answer, asked), timeout_s=math.inf)
        self._asked[asked.fetch.fetch_id] = asked

    def _on_answer(self, asked: _Asked, reply: Fetched | KVBusError) -> None:
        """Without a clear no, the agent may have taken the fetch: its blocks stay in doubt."""
        if self.lost is None:
            self._asked.pop(asked.fetch.fetch_id, None)
        if isinstance(reply, Fetched):
            self._end(reply)
            return
        if self.lost is not None:
            return
        if self.may_be_asked_next(reply):
            self._put_off(asked, reply)
            return
        fetch, now = asked.fetch, time.monotonic()
        pause_s = asked.pauses.after(reply, now) if self.retry_busy else None
        if pause_s is not None and fetch.notice is None:
            asyncio.get_running_loop().call_later(pause_s, self._ask_again, asked)
            fetch.give_up = partial(self._give_up, fetch)
            self._asked[fetch.fetch_id] = asked
            return
        refused = isinstance(reply, RequestRefused)
        self._end(_failed(fetch, reply, stage="requested", blocks_free=refused))

    def _ask_again(self, asked: _Asked) -> None:
        fetch, message = asked.fetch, asked.message
        fetch.give_up = None
        if fetch.notice is not None or self.lost is not None:
            return
        if message.timeout_s is not None:
            message = replace(message, timeout_s=max(1e-3, fetch.overdue_at - time.monotonic()))
        self._ask(asked._replace(message=message))

    # Until the next agent is there nobody has begun the fetch: its blocks are the engine's.
    def _put_off(self, asked: _Asked, error: KVBusError) -> None:
        fetch = asked.fetch
        self._fetches.pop(fetch.fetch_id, None)
        fetch.give_up = partial(self._give_up, fetch)

        def go_on(session: DecodeSession | None) -> None:
            if fetch.notice is not None:
                return
            if session is not None:
                session._take_over(asked)
                return
            self._fetches[fetch.fetch_id] = fetch
            self._end(_failed(fetch, error, stage="requested", blocks_free=True))

        self.when_followed(go_on)

    def _take_over(self, asked: _Asked) -> None:
        """The agent of the session before this one did not begin the fetch."""
        if self.lost is not None:
            self._put_off(asked, self.lost)
            return
        asked.fetch.move(self)
        self._fetches[asked.fetch.fetch_id] = asked.fetch
        self._ask_again(asked)

    def _give_up(self, fetch: Fetch) -> None:
        """The agent knows nothing of the fetch: it ends here, once."""
        if fetch.notice is not None:
            return
        self._asked.pop(fetch.fetch_id, None)
        error = LocalError("the engine cancelled the fetch", code=ErrorCode.CANCELLED)
        self._fetches[fetch.fetch_id] = fetch
        ended = _failed(fetch, error, stage="requested", blocks_free=True)
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
                self._end(_failed(fetch, error, stage="silent", blocks_free=False))

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
        is_observed = fetch is not None and fetch.is_observed
        if self._on_fetched is not None and not is_observed:
            self._on_fetched(fetched)

    def _free(self, freed: BlocksFreed) -> None:
        fetch = self._fetches.pop(freed.fetch_id, None)
        if fetch is not None:
            fetch.settle(blocks_free=True)
        is_observed = fetch is not None and fetch.is_observed
        if self._on_blocks_freed is not None and not is_observed:
            self._on_blocks_freed(freed)

    def _going_on(self) -> Latch | None:
        return next((fetch.settled for fetch in self._fetches.values()), None)

    def _ends_within_s(self) -> float:
        """An agent that stops waits for its transfers; their blocks are free when it is gone."""
        return DOUBT_S if self._fetches else super()._ends_within_s()

    def _on_lost(self, error: KVBusError) -> None:
        """A process that is gone does not write; other agents, or one that only lost us, may."""
        if self.is_left and self.is_kept:
            for asked in [one for one in self._asked.values() if one.fetch.notice is None]:
                self._put_off(asked, error)
        is_gone = isinstance(error, PeerLost) and not isinstance(error, AgentHungUp)
        blocks_free = is_gone and not self.others
        for fetch in list(self._fetches.values()):
            if fetch.notice is None:
                self._end(_failed(fetch, error, stage="lost", blocks_free=blocks_free))
            elif blocks_free:
                self._free(BlocksFreed(fetch.fetch_id))
            fetch.settle(blocks_free=blocks_free)
        self._fetches.clear()


def _failed(fetch: Fetch, error: KVBusError, *, stage: str, blocks_free: bool) -> Fetched:
    return Fetched(
        fetch_id=fetch.fetch_id,
        request_id="",
        outcome=Outcome.FAILED,
        stage=stage,
        blocks_free=blocks_free,
        code=error.code.value,
        message=error.message,
    )


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
            ids = block_ids.get(group.name, ())
            tables[group.name] = BlockTable.of(ids, first_block=start // group.block_size)
    return tables
