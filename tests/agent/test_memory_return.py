"""The memory of an engine that is gone is given back beside the event loop, and then it is told."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.agent import MemoryReturn

pytestmark = pytest.mark.anyio


@dataclass
class Process:
    """An engine process whose memory notes what is done with it, and in which thread."""

    done: list[tuple[str, int]] = field(default_factory=list)
    direct: bool = True
    engine_id: str = "e"

    @property
    def segments(self) -> "Process":
        return self

    @property
    def connection(self) -> "Process":
        return self

    def discard(self) -> None:
        self.note("discarded")

    def hang_up(self) -> None:
        self.note("told")

    def registered_pages(self) -> list[Any]:
        return []

    async def unmap(self, _: object) -> None:
        self.note("unmapped")

    def note(self, what: str) -> None:
        self.done.append((what, threading.get_ident()))


async def nothing(_: object) -> None:
    """Nothing touches the memory."""


async def test_bytes_go_beside_the_loop_before_who_lives_is_told_and_addresses_go_last() -> None:
    process: Any = Process()
    quiet: Any = SimpleNamespace(copied=nothing, quiesce=nothing)
    returned: Any = MemoryReturn(None, lambda: quiet)  # type: ignore[arg-type]

    await returned.take_away([process], None)

    assert [what for what, _ in process.done] == ["discarded", "told", "unmapped"]
    assert process.done[0][1] != threading.get_ident()
