"""Reads ahead: by the blocks that the ticket names, before there is a lease, or without one.

Refuses nothing itself: what was read counts for nothing until the prefill agent has said yes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from kvbus.geometry import BlockTable


# Why bytes that were read without a lease can never be wrong tokens:
#
#     blocks   last write ───────────────────────────────────────── released, written anew
#     ticket      └ names them ──▶
#     offer           sealed
#     fetch                        READ ──────────┤ last byte
#                                    claim ─▶ lease   confirm ─▶ yes
#                                                 or     take ─▶ yes
#
# The prefill engine writes to the blocks of an offer until the ticket names them, and again after
# the release. A confirm or a take is sent after the last byte, and its yes says that the offer was
# sealed and live then and that these were its blocks: so the READ lies between the two. A lease
# adds nothing to the bytes. It keeps the offer from expiring under a long read, keeps other readers
# away, and makes the prefill agent drive what needs its progress. A yes ends the offer, so that of
# many readers one gets it. It is said again to the fetch that got it and to nobody else: to who
# shows its token, which is new for each fetch.
#
# An engine that names the blocks itself seals at the same moment, and the ticket may be faster than
# the seal. What the prefill agent says of an offer that is still open bears nothing out: a lease on
# it is kept, and no more. The tables are compared when it says that the offer is sealed, or by the
# take, which is refused before the seal and asked again.
@dataclass(frozen=True, slots=True)
class Ahead:
    """The offer's block tables, as the ticket names them.

    With ``claims`` the lease is asked for at once, beside the read; without, when the read takes
    long.
    """

    tables: Mapping[str, BlockTable]
    claims: bool
