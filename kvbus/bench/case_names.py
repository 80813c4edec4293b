"""The names of the cases, for the command line: to import a case would cost it seconds."""

from enum import StrEnum


class CaseName(StrEnum):
    """The cases, in the order in which they are measured."""

    CONTIGUOUS_64M = "contiguous-64m"
    CONTIGUOUS_256M = "contiguous-256m"
    SCATTERED_256K = "scattered-256k"
    SCATTERED_16K = "scattered-16k"
    FIXED = "fixed"
    LOAD = "load"
    IDLE = "idle"
    RATE = "rate"
    TP_1_TO_2 = "tp-1-to-2"
    TP_2_TO_1 = "tp-2-to-1"
    HND_TO_NHD = "hnd-to-nhd"
    BLOCK_64_TO_16 = "block-64-to-16"
    MLA = "mla-2-to-1"
    CHUNKED = "chunked"
    HOST = "host"
    MEMORY = "memory"
    PLANNING = "planning"
    RATES = "rates"


ONLY_WHEN_ASKED = {CaseName.MEMORY, CaseName.PLANNING, CaseName.RATES}
"""These are no handoffs beside bare NIXL, so they run when ``--only`` names them."""
EVERY_TIME = tuple(name for name in CaseName if name not in ONLY_WHEN_ASKED)
