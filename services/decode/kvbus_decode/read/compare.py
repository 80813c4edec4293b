"""Compares what was read with what the holder has, piece by piece, before a chunk ends well.

Refuses to say that the holder's bytes are the offer's: that is the confirm's, which comes later.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import structlog

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.process.service import Agent
from kvbus.agent.staging.copiers import Copiers
from kvbus.agent.staging.digests import Digester, Digesting, Places, Wanted
from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError, RequestRefused
from kvbus.geometry import Box
from kvbus.memory.digest_pieces import Digests
from kvbus.planning import Share
from kvbus.planning.digests import Numbers, piece_of
from kvbus.protocol import digests as wire
from kvbus_decode.metrics import DecodeMetrics
from kvbus_decode.peer.route import Source
from kvbus_decode.read import events as ev
from kvbus_decode.read.chunk import Chunk
from kvbus_decode.read.leg import LegState

log = structlog.get_logger()

MAX_LOGGED = 16
"""Pieces that differ and are named in the log."""

LONG_BYTES = 8 << 20
ASK_LONG_AFTER_S = 1e-3
"""A read of so many bytes takes longer than this."""


@dataclass(slots=True, eq=False)
class CompareJob:
    """One box of a share: the holder's digests, once they are here, and ours, while we make them.

    ``places`` are those of the pieces in our memory, if they were found before all has landed,
    ``different`` the first of those that differ.

    Refuses a source that makes none, with `LocalError` (``incompatible``).
    """

    chunk: Chunk
    source: Source
    share: Share
    box: Box
    expected: Digests | None = None
    places: Mapping[RankMemory, Places] | None = None
    copying: Digesting | None = None
    different: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.source.digests:
            raise cannot_compare(f"prefill agent at {self.source.peer.endpoint}")

    @property
    def ranks(self) -> Mapping[RankMemory, int]:
        """The ranks of ours that it was read for, with their numbers."""
        ranks = self.chunk.route.engine.ranks
        return {ranks[number]: number for number in self.share.readers}

    def wanted(self) -> Wanted:
        """What is digested here."""
        chunk, box = self.chunk, self.box
        return Wanted(box, chunk.target[box.group], chunk.offer_id, chunk.one_in)


# The prefill engine does not write to the blocks between the first question and the confirm, so
# the holder's digests may be made before, while or after the bytes are read. They are asked for
# while these move, and cost no time of their own where cores are free.
#
#     holder             digests ──▶┤
#     read      READ, copy ────────────▶┤ all has landed
#     ours       └ask ─▶ places?        └─ digests ─▶ equal? ─▶ chunk ended ─▶ confirm, or take
#
# To ask takes Python, and so would keep a thread from beginning to copy: of a long read it comes
# a little later, when threads copy and this one waits. So does the search for the few pieces that
# are digested here.
#
# The yes to that says that the offer was live all along: so the digests were of its bytes, too.
# Where they differ no confirm follows, so the holder is asked once more whether the offer lives.
class Comparison:
    """The legs that compare, of all reads; ``dispatch`` takes what comes of them."""

    def __init__(
        self,
        agent: Agent,
        copiers: Copiers,
        metrics: DecodeMetrics,
        dispatch: Callable[[ev.Event], None],
    ) -> None:
        self._agent, self._dispatch = agent, dispatch
        self._digester = Digester(copiers, job_bytes=agent.transport.limits.slice_bytes)
        self._equal, self._different = map(metrics.digests.labels, ("equal", "different"))

    def forget(self, engine: LocalEngine) -> None:
        """The engine is gone."""
        self._digester.forget(engine)

    def ask(self, command: ev.AskDigests) -> None:
        """Ask the holder, as soon as that holds up nothing."""
        chunk: Chunk = command.leg.work.chunk
        if chunk.route.num_bytes(chunk.spans) < LONG_BYTES:
            self._ask(command)
        else:
            self._agent.loop.call_later(ASK_LONG_AFTER_S, self._ask_late, command)

    def _ask_late(self, command: ev.AskDigests) -> None:
        """Unless nobody wants to know any more."""
        work: CompareJob = command.leg.work
        if command.leg.state is not LegState.ASKING:
            return
        self._ask(command)
        engine, ranks = work.chunk.route.engine, tuple(work.ranks)
        work.places = self._digester.places(work.wanted(), engine=engine, ranks=ranks)

    def _ask(self, command: ev.AskDigests) -> None:
        self._request(command.leg.work, partial(self._on_reply, command))

    def _request(
        self, work: CompareJob, on_reply: Callable[[wire.Digests | KVBusError], None]
    ) -> None:
        chunk, source = work.chunk, work.source
        message = wire.Digest(
            agent_boot=source.agent_boot,
            engine_id=chunk.route.prefill.engine_id,
            memory_id=source.memory_id,
            offer_id=chunk.offer_id,
            rank=work.share.holder,
            box=work.box,
            table=chunk.blocks_of(work.box),
            one_in=chunk.one_in,
            secret=chunk.secret,
            access=source.access,
        )
        timeout_s = max(1e-3, chunk.deadline - self._agent.loop.time())
        source.peer.ask(message, timeout_s, on_reply)

    def start(self, command: ev.StartCompare) -> None:
        """Digest what has landed."""
        work: CompareJob = command.leg.work
        work.copying = self._digester.start(
            work.wanted(),
            partial(self._on_digested, command, work),
            engine=work.chunk.route.engine,
            ranks=tuple(work.ranks),
            places=work.places,
        )

    def _on_reply(self, command: ev.AskDigests, reply: wire.Digests | KVBusError) -> None:
        key, leg = command.key, command.leg
        if isinstance(reply, KVBusError):
            self._dispatch(ev.CompareEnded(key, leg, reply))
            return
        leg.work.expected = np.frombuffer(reply.digests[: len(reply.digests) // 8 * 8], "<u8")
        self._dispatch(ev.DigestsCame(key, leg))

    def _on_digested(
        self,
        command: ev.StartCompare,
        work: CompareJob,
        error: KVBusError | None,
        digesting: Digesting,
    ) -> None:
        work.copying = None
        for rank, found in digesting.found.items() if error is None else ():
            error = error or self._compare(work, work.ranks[rank], found)
        if error is None or error.code is not ErrorCode.DIGEST_MISMATCH:
            self._dispatch(ev.CompareEnded(command.key, command.leg, error))
        else:
            self._request(work, partial(self._on_asked_again, command, error))

    def _on_asked_again(
        self, command: ev.StartCompare, mismatch: KVBusError, reply: wire.Digests | KVBusError
    ) -> None:
        """Bytes differ. If the offer has ended meanwhile they may, and that is why it failed."""
        if isinstance(reply, RequestRefused):
            self._dispatch(ev.CompareEnded(command.key, command.leg, reply))
            return
        self._different.inc(float(mismatch.detail["num_different"]))
        log.error(
            "digest.failed",
            read=str(command.key),
            reason=mismatch.message,
            pieces=command.leg.work.different,
            **mismatch.detail,
        )
        self._dispatch(ev.CompareEnded(command.key, command.leg, mismatch))

    def _compare(self, work: CompareJob, rank: int, found: Digests) -> KVBusError | None:
        """Why the read has failed, if one of its pieces differs."""
        expected = work.expected
        if expected is None or expected.size != found.size:
            told = 0 if expected is None else expected.size
            return RemoteError(
                f"the prefill agent told {told} digests, {found.size} pieces are compared",
                code=ErrorCode.INVALID,
            )
        wrong = np.flatnonzero(expected != found)
        self._equal.inc(found.size - wrong.size)
        if not wrong.size:
            return None
        numbers = work.wanted().pieces()[wrong]
        some = numbers[:MAX_LOGGED].tolist()
        work.different = [piece_of(work.box, number)._asdict() for number in some]
        return _mismatch(work, rank, numbers, found.size)


def cannot_compare(agent: str) -> LocalError:
    """Why a fetch fails whose bytes cannot be compared as the configuration wants them to be."""
    return LocalError(
        f"the {agent} makes no digests: run a newer kvbus there, or set key 'digest' of this "
        'agent\'s configuration to "off"',
        code=ErrorCode.INCOMPATIBLE,
        field="digests",
    )


def _mismatch(work: CompareJob, rank: int, wrong: Numbers, num_compared: int) -> RemoteError:
    """Names the first piece that differs."""
    piece, holder = piece_of(work.box, int(wrong[0])), work.share.holder
    return RemoteError(
        f"rank {rank} has other bytes than rank {holder} of prefill engine "
        f"'{work.chunk.route.prefill.engine_id}': group '{work.box.group}', layer {piece.layer}, "
        f"'{piece.part}', head {piece.head}, tokens {piece.start} to {piece.stop}; {wrong.size} of "
        f"{num_compared} pieces differ",
        code=ErrorCode.DIGEST_MISMATCH,
        rank=rank,
        holder=holder,
        group=work.box.group,
        layer=piece.layer,
        part=piece.part,
        head=piece.head,
        first_token=piece.start,
        end_token=piece.stop,
        num_different=int(wrong.size),
    )
