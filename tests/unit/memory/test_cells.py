"""Pages of cells, and what two processes make of one cell."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from typing import IO

import pytest
from msgspec.structs import replace

from kvbus.errors import ErrorCode
from kvbus.memory.mapping import CellsPage, PassedFile, SegmentMapping
from kvbus.memory.segment import SharedSegment
from kvbus.protocol import CELLS_BYTES, NUM_CELLS, CellNames, CommitCell, Ticket

SIZE_BYTES = 8192
HALF = SIZE_BYTES // 2
GOOD, POISON = 0x11, 0xEE


ENGINE, REQUEST = ("engine", "instance"), ("offer", "request")
TICKET = Ticket("prefill", "boot", "tcp://127.0.0.1:1", *ENGINE, *REQUEST, 32, 32 * "a")


@contextmanager
def passed(fd: int) -> Iterator[CellsPage]:
    """The page as an agent has it."""
    file = PassedFile(os.dup(fd), size_bytes=CELLS_BYTES)
    with CellsPage(file) as page:
        yield page
    file.close()


def live_cell(page: SharedSegment, names: CellNames) -> tuple[int, CommitCell]:
    """Open a cell; return its name, and the agent's view of it."""
    name = names.open()
    cell = CommitCell(page.swap, replace(TICKET, cell=name))
    cell.open(name)
    return name, cell


@pytest.mark.usefixtures("nothing_leaks")
def test_other_side_sees_swap_until_either_closes_its_page() -> None:
    with SharedSegment(CELLS_BYTES) as ours, passed(ours.fd) as theirs:
        names = CellNames(ours.swap)
        lent = SegmentMapping(theirs.reopen(), size_bytes=CELLS_BYTES)
        name = names.open()
        agent, reader = (CommitCell(one.swap, replace(TICKET, cell=name)) for one in (theirs, lent))
        agent.open(name)
        assert reader.commit("token")
        assert agent.close() is ErrorCode.OFFER_COMPLETED

        name, _ = live_cell(ours, names)
        lent.close()
        late, agent = (CommitCell(one.swap, replace(TICKET, cell=name)) for one in (lent, theirs))
        assert not late.commit("token")
        assert agent.close() is None


class Reader:
    """The process of ``cell_reader.py``."""

    def __init__(self, command: list[str], *fds: int) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, pass_fds=fds)
        self.input: IO[str] = self._process.stdin  # type: ignore[assignment]  # it is a pipe
        self.output: IO[str] = self._process.stdout  # type: ignore[assignment]
        assert self.output.readline() == "ready\n"

    def step(self, *cells: object) -> list[str]:
        """Have it do one step; return what it prints."""
        print(*cells, file=self.input, flush=True)
        return self.output.readline().split()

    def end(self) -> None:
        self.input.close()
        assert self._process.wait() == 0
        self.output.close()


Shared = tuple[Reader, SharedSegment, SharedSegment]


@pytest.fixture
def shared(child_command: Callable[..., list[str]]) -> Iterator[Shared]:
    """The reader, its cells and its blocks."""
    with SharedSegment(CELLS_BYTES) as page, SharedSegment(SIZE_BYTES) as blocks:
        fds, ticket = (page.fd, blocks.fd), json.dumps(TICKET.to_json())
        reader = Reader(child_command("cell_reader", *fds, ticket), *fds)
        yield reader, page, blocks
        reader.end()


# The engine closes the cell and then overwrites its blocks. The reader copies them and then commits
# the cell. Each has three steps, which run in all 20 orders.
def test_no_order_commits_other_bytes(shared: Shared) -> None:
    reader, page, blocks = shared
    commits, names = 0, CellNames(page.swap)
    for places in combinations(range(6), 3):
        blocks.view()[:] = GOOD
        name, _ = live_cell(page, names)
        engine: list[Callable[[], object]] = [
            partial(names.close, name),
            lambda: blocks.view()[:HALF].fill(POISON),
            lambda: blocks.view()[HALF:].fill(POISON),
        ]
        reads = [("copy", 0, HALF), ("copy", HALF, HALF), ("take", name)]
        shown = [
            engine.pop(0)() if place in places else reader.step(*reads.pop(0)) for place in range(6)
        ]
        is_committed, content = next(one for one in reversed(shown) if isinstance(one, list))
        commits += is_committed == "True"
        assert is_committed == "False" or content == SIZE_BYTES * f"{GOOD:02x}", places

    assert commits == 1, "its reader was done before the cell was closed"


def test_one_of_two_processes_wins_a_cell(shared: Shared) -> None:
    reader, page, _ = shared
    names = CellNames(page.swap)
    for _ in range(10):
        live = [live_cell(page, names) for _ in range(NUM_CELLS)]
        reader.step("race", *(name for name, _ in live))
        seen = [cell.close() is ErrorCode.OFFER_COMPLETED for _, cell in reversed(live)]
        taken = [one == "1" for one in reader.output.readline().split()]
        assert taken == seen[::-1]
        for name, _ in live:
            names.close(name)
