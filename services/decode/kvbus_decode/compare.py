"""Compares what was read with what the holder has, piece by piece, before a chunk ends well."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import structlog

from kvbus.agent.digests import Digests, Wanted, start_digest
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, KVBusError, LocalError, RemoteError
from kvbus.geometry import Box
from kvbus.planning import Share, piece_of
from kvbus.protocol import peer as wire
from kvbus_decode.chunk import Chunk
from kvbus_decode.observe import DecodeMetrics
from kvbus_decode.read_table import Begin, Event, Leg, StageEnded
from kvbus_decode.route import Source

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class CompareJob:
    """One box of a share; ``found`` has the digests of our ranks, and under None the holder's.

    Raises `LocalError` (``incompatible``) for a source that makes none.
    """

    chunk: Chunk
    source: Source
    share: Share
    box: Box
    found: dict[int | None, Digests] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.source.digests:
            raise LocalError(
                f"the prefill agent at {self.source.peer.endpoint} makes no digests: run a newer "
                "kvbus there, or set key 'digest' of this agent's configuration to \"off\"",
                code=ErrorCode.INCOMPATIBLE,
                field="digests",
            )

    @property
    def wanted(self) -> Wanted:
        """What is digested here."""
        chunk, box = self.chunk, self.box
        return Wanted(
            box, chunk.asked.tables[box.group], chunk.ticket.offer_id, chunk.one_in, chunk.turn
        )


# The holder answers if the offer is live once its digests are made, and it is asked when all has
# landed. So an answer is of the bytes that were read, and bytes that differ are never those of an
# offer that ended meanwhile, whose blocks have other uses then:
#
#     read       READ, copy ──▶ all has landed
#     ours                      ├─ digests ───────────────┐
#     holder                    └─ask─▶ digests ─▶ live? ─┴▶ equal? ─▶ chunk ended ─▶ take
#     offer      live ──────────────────────────────▶
class Comparison:
    """The legs that compare, of all reads; ``dispatch`` takes what comes of them."""

    def __init__(
        self,
        agent: Agent,
        metrics: DecodeMetrics,
        dispatch: Callable[[Event], None],
    ) -> None:
        self._agent, self._dispatch = agent, dispatch
        self._counts = metrics.digests.values

    def start(self, leg: Leg, _: Begin) -> None:
        """Ask the holder, and digest what has landed meanwhile."""
        work: CompareJob = leg.work
        chunk, source = work.chunk, work.source
        message = wire.Digest(
            agent_boot=source.agent_boot,
            engine_id=chunk.route.prefill.engine_id,
            memory_id=source.memory_id,
            offer_id=chunk.ticket.offer_id,
            rank=work.share.holder,
            box=work.box,
            table=chunk.blocks_of(work.box),
            one_in=chunk.one_in,
            secret=chunk.ticket.secret,
            access=source.access,
        )
        timeout_s = max(1e-3, chunk.fetch.deadline - self._agent.loop.time())
        source.peer.ask(message, timeout_s, partial(self._on_reply, leg))
        engine = chunk.route.engine
        for rank in work.share.readers:
            on_end = partial(self._take, leg, rank)
            start_digest(
                self._agent.copiers,
                work.wanted,
                on_end,
                engine=engine,
                rank=engine.ranks[rank],
            )

    def _on_reply(self, leg: Leg, reply: wire.Digests | KVBusError) -> None:
        if isinstance(reply, wire.Digests):
            told = np.frombuffer(reply.digests[: len(reply.digests) // 8 * 8], "<u8")
            self._take(leg, None, told)
        else:
            self._take(leg, None, reply)

    def _take(self, leg: Leg, rank: int | None, found: Digests | KVBusError) -> None:
        """The last digests that come are compared; a leg that is over hears nothing of it."""
        work: CompareJob = leg.work
        if isinstance(found, KVBusError):
            self._dispatch(StageEnded(leg, error=found))
            return
        work.found[rank] = found
        if len(work.found) <= len(work.share.readers):
            return
        errors = (self._compare(work, rank, work.found[None]) for rank in work.share.readers)
        error = next(filter(None, errors), None)
        if error is not None:
            fetch_id = work.chunk.asked.fetch_id
            log.error("digest.failed", fetch_id=fetch_id, reason=error.message, **error.detail)
        self._dispatch(StageEnded(leg, error=error))

    def _compare(self, work: CompareJob, rank: int, expected: Digests) -> KVBusError | None:
        """Why the read has failed, if a piece of the rank differs."""
        found = work.found[rank]
        if expected.size != found.size:
            return RemoteError(
                f"the prefill agent told {expected.size} digests, {found.size} pieces are compared",
                code=ErrorCode.INVALID,
            )
        wrong = np.flatnonzero(expected != found)
        self._counts["equal",] += found.size - wrong.size
        self._counts["different",] += wrong.size
        if not wrong.size:
            return None
        return _mismatch(work, rank, int(wrong[0]), wrong.size, found.size)


def _mismatch(
    work: CompareJob, rank: int, first: int, num_wrong: int, num_compared: int
) -> RemoteError:
    """Names the first piece that differs."""
    piece, holder = piece_of(work.wanted.boxes(), first), work.share.holder
    return RemoteError(
        f"rank {rank} has other bytes than rank {holder} of prefill engine "
        f"'{work.chunk.route.prefill.engine_id}': group '{work.box.group}', layer {piece.layer}, "
        f"'{piece.part}', head {piece.head}, tokens {piece.start} to {piece.stop}; {num_wrong} of "
        f"{num_compared} pieces differ",
        code=ErrorCode.DIGEST_MISMATCH,
        rank=rank,
        holder=holder,
        group=work.box.group,
        num_different=num_wrong,
        **piece._asdict(),
    )
