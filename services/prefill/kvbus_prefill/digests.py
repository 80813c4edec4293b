"""Answers readers that ask for digests of what they have read.

A digest tells of bytes: boxes that the offer does not have, and readers without its secret, are
refused.
"""

from collections.abc import Callable
from functools import partial

from kvbus.agent.digests import Digester, Wanted
from kvbus.agent.service import Agent
from kvbus.bus import Call
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError
from kvbus.geometry import canonical_order, slot_region
from kvbus.memory.digest_pieces import Digests as Found
from kvbus.planning.digests import num_pieces
from kvbus.protocol.peer import MAX_DIGESTS, Digest, Digests
from kvbus.table import Key
from kvbus_prefill.gather import Packing
from kvbus_prefill.gather_box import check_rank_has
from kvbus_prefill.offer.table import OfferTable


class DigestServer:
    """The digests of a prefill agent, made in the threads that gather."""

    def __init__(self, agent: Agent, packing: Packing, offers: OfferTable) -> None:
        self._packing, self._offers = packing, offers
        slice_bytes = agent.transport.limits.slice_bytes
        self._digester = Digester(packing.copiers, job_bytes=slice_bytes)

    def digest(self, asked: Digest, call: Call) -> None:
        """Reply when the digests are made; raises `LocalError`, `GeometryError`."""
        engine = self._packing.engine(asked.engine_id, asked.memory_id, asked.access)
        memory, group = check_rank_has(engine, asked.rank, asked.box, asked.table)
        if num_pieces(asked.box) > MAX_DIGESTS:
            raise GeometryError(
                f"a box of {num_pieces(asked.box)} pieces, digests are made of at most "
                f"{MAX_DIGESTS}: ask for a smaller one",
                field="box",
            )
        slot_region(group, asked.box, canonical_order())
        is_state = bool(group.state)
        offered_here = engine.control is not None

        def check() -> None:
            if offered_here:
                self._offers.check_digest(asked, is_state=is_state)

        check()
        wanted = Wanted(asked.box, asked.table, asked.offer_id, asked.one_in, Key(asked.offer_id))
        on_end = partial(_reply, call, check)
        work = self._digester.start(wanted, on_end, engine=engine, rank=memory)
        if work is not None:
            error = LocalError("nobody waits", code=ErrorCode.CANCELLED)
            call.on_end = partial(work.stop, error)


# An offer that ends while its blocks are digested may have other bytes in them by then. So it is
# looked at twice: before, for who may ask, and when the digests are made, for what they are worth.
def _reply(call: Call, check: Callable[[], None], found: Found | KVBusError) -> None:
    try:
        if isinstance(found, KVBusError):
            raise found
        check()
    except KVBusError as error:
        call.refuse(error)
    else:
        call.reply(Digests(digests=found.astype("<u8").tobytes()))
