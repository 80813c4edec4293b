"""Moved to `tests.process.shapes`."""

from tests.process.shapes import (
    FETCH_TIMEOUT_S,
    GROUP,
    PATHS,
    SLOT_BYTES,
    ShapedAgents,
    Side,
    blocks_between,
    hand_over,
    laid_out,
    two_engines,
)

__all__ = [
    "FETCH_TIMEOUT_S",
    "GROUP",
    "PATHS",
    "SLOT_BYTES",
    "ShapedAgents",
    "Side",
    "blocks_between",
    "hand_over",
    "laid_out",
    "two_engines",
]
