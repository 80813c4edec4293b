"""Control sessions that count what their agent tells them: each end is told once.

Prefill blocks are written anew in the callback of ``released`` (`OverwritingPrefill`).
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbus.geometry import EngineSpec
from kvbus.protocol import BlocksFreed, Fetched, Notice, Released
from tests.chaos.pool import Report
from tests.strict_sessions import FreeBlocks, OverwritingPrefill, WatchingDecode

ENDS = (Released.op, Fetched.op, BlocksFreed.op)


class _Once:
    """What was told by the agent, to find what is told twice."""

    report: Report

    def __init__(self, *args: Any, report: Report, **more: Any) -> None:
        super().__init__(*args, **more)
        self.report = report
        self._told: set[tuple[str, str]] = set()

    def _on_notice(self, notice: Notice) -> None:
        if notice.op in ENDS:
            key = notice.op, str(notice.body.get("offer_id") or notice.body.get("fetch_id"))
            if key in self._told:
                self.report("told_twice", f"{notice.op} of {key[1]}")
            self._told.add(key)
        super()._on_notice(notice)  # type: ignore[misc]  # of the session that this is mixed into


class ChaosPrefill(_Once, OverwritingPrefill):
    """A prefill engine's."""


@dataclass
class FreeRing:
    """What was in the free blocks of a ring; all sessions of an engine have the same ring."""

    blocks: list[FreeBlocks] = field(default_factory=list)


class ChaosDecode(_Once, WatchingDecode):
    """A decode engine's; with ``caches`` (those of a ring) it also looks when a fetch starts."""

    def __init__(self, attach: Path, engine: EngineSpec, ring: FreeRing, **more: Any) -> None:
        self._ring = ring
        super().__init__(attach, engine, **more)

    @property
    def _free_blocks(self) -> list[FreeBlocks]:
        return self._ring.blocks

    @_free_blocks.setter
    def _free_blocks(self, blocks: list[FreeBlocks]) -> None:
        self._ring.blocks = blocks

    def fetch(self, *args: Any, **more: Any) -> Any:
        self.look()
        return super().fetch(*args, **more)

    def look(self) -> None:
        """Whether anything has landed in free blocks of failed fetches."""
        try:
            self.check_free_blocks()
        except AssertionError as error:
            self.report("late_write", f"in the ring: {error}")
            self._free_blocks = []
