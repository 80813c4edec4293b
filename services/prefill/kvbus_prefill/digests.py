"""Answers readers that ask for digests of what they have read, or are about to read.

Refuses boxes that the offer does not have, and who has no right to its bytes: a digest tells of
them.
"""

from functools import partial

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.engines.rank_memory import RankMemory
from kvbus.agent.process.service import Agent
from kvbus.agent.staging.digests import Digester, Digesting, Wanted
from kvbus.bus import Call
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.geometry import Box, GroupSpec, canonical_order, slot_region
from kvbus.planning.digests import num_pieces
from kvbus.protocol.digests import MAX_DIGESTS, Digest, Digests
from kvbus_prefill.gather import Packing
from kvbus_prefill.gather_box import check_rank_has
from kvbus_prefill.offer.entry import OfferedBox
from kvbus_prefill.offer.table import OfferTable


class DigestServer:
    """The digests of a prefill agent, made in the threads that gather.

    When they are made does not matter: what the reader has counts once its lease, or the offer, is
    found to have lasted until after that.
    """

    def __init__(self, agent: Agent, packing: Packing, offers: OfferTable) -> None:
        self._packing, self._offers = packing, offers
        slice_bytes = agent.transport.limits.slice_bytes
        self._digester = Digester(packing.copiers, job_bytes=slice_bytes)

    def forget(self, engine: LocalEngine) -> None:
        """The engine is gone."""
        self._digester.forget(engine)

    def digest(self, asked: Digest, call: Call) -> None:
        """Reply when the digests are made; raises `LocalError`, `GeometryError`."""
        engine = self._packing.engine(asked.engine_id, asked.memory_id, asked.access)
        memory, group = check_rank_has(engine, asked.rank, asked.box, asked.table)
        _check_pieces(group, asked.box)
        if engine.control is not None:
            offered = OfferedBox(
                offer_id=asked.offer_id,
                epoch=0,
                token="",
                group=group.name,
                table=asked.table,
                stop=asked.box.stop,
                opaque=bool(group.state),
                secret=asked.secret,
            )
            self._offers.check_read(offered, engine.engine_id)
        wanted = Wanted(asked.box, asked.table, asked.offer_id, asked.one_in)
        on_end = partial(_reply, call, memory)
        digesting = self._digester.start(wanted, on_end, engine=engine, ranks=(memory,))
        call.on_end = partial(digesting.stop, LocalError("nobody waits", code=ErrorCode.CANCELLED))


def _check_pieces(group: GroupSpec, box: Box) -> None:
    """Raise `GeometryError` unless they are of the group, and no more than one reply holds."""
    if num_pieces(box) > MAX_DIGESTS:
        raise GeometryError(
            f"a box of {num_pieces(box)} pieces, digests are made of at most {MAX_DIGESTS}: ask "
            "for a smaller one",
            field="box",
        )
    slot_region(group, box, canonical_order())


def _reply(call: Call, memory: RankMemory, error: KVBusError | None, digesting: Digesting) -> None:
    if error is not None:
        call.refuse(error)
    else:
        call.reply(Digests(digests=digesting.found[memory].astype("<u8").tobytes()))
