"""Moved to `tests.process.spread_engines`."""

from tests.process.spread_engines import (
    ACCESS,
    RankSession,
    SpreadEngine,
    others_of,
    ranks_elsewhere,
    spread_engine,
)

__all__ = [
    "ACCESS",
    "RankSession",
    "SpreadEngine",
    "others_of",
    "ranks_elsewhere",
    "spread_engine",
]
