"""Data processes and flat memory, which end with the test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvbus.data import messages as wire
from tests.support.data_process import Data, FlatMemory, Held

Start = Callable[..., Data]
MakeMemory = Callable[..., FlatMemory]


def code_of(reply: wire.DataReply) -> str | None:
    return reply.error.code if reply.error else None


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as ends:

        def make(name: str = "data", **options: Any) -> Data:
            data = Data(name, **options)
            ends.callback(data.end)
            return data

        yield make


@pytest.fixture
def memory() -> Iterator[MakeMemory]:
    with ExitStack() as ends:

        def make(num_blocks: int, block_bytes: int, **options: Any) -> FlatMemory:
            made = FlatMemory.of(num_blocks, block_bytes, **options)
            ends.callback(made.segment.close)
            return made

        yield make


@pytest.fixture
def one(start: Start) -> Data:
    """A data process without NIXL."""
    return start()


@dataclass
class Pair:
    """A reader, and a holder that drives progress; the reader's plan 1 is from all to all."""

    reader: Data
    holder: Data
    ours: FlatMemory
    theirs: FlatMemory
    held: Held
    start: Start

    @property
    def blocks(self) -> range:
        return range(len(self.theirs.blocks))

    def read_all(self) -> int:
        return self.reader.read(1, self.blocks, self.blocks)

    def read_of_stopped(self) -> int:
        """Stop the holder, once connected, and start a READ of all blocks."""
        assert self.can_read()
        self.holder.stop()
        number = self.read_all()
        self.reader.call(wire.Barrier())
        return number

    def can_read(self, source: int = 3, target: int = 5) -> bool:
        """Whether a block arrives."""
        self.ours.blocks[target] = 0
        self.reader.result(self.reader.read(1, [source], [target]))
        return np.array_equal(self.ours.blocks[target], self.theirs.blocks[source])

    def add_holder(self, name: str, flat: FlatMemory) -> tuple[Data, Held]:
        other = opened(self.start(name))
        return other, other.hold(1, flat)


def opened(data: Data) -> Data:
    data.call(wire.OpenNixl())
    data.call(wire.DriveProgress(on=True))
    return data


MakePair = Callable[..., Pair]


@pytest.fixture
def make_pair(start: Start, memory: MakeMemory) -> MakePair:
    """Make a pair with so many blocks each; ``options`` are the reader's."""

    def make(
        num_blocks: int = 256,
        block_bytes: int = 16 << 10,
        *,
        tls: str = "all",
        sealed: bool = True,
        **options: Any,
    ) -> Pair:
        env = {"UCX_TLS": tls, **options.pop("env", {})}
        reader, holder = start("reader", env=env, **options), opened(start("holder", env=env))
        reader.call(wire.OpenNixl())
        ours = memory(num_blocks, block_bytes)
        theirs = memory(num_blocks, block_bytes, seed=1, sealed=sealed)
        held = holder.hold(1, theirs)
        reader.add(1, ours)
        reader.meet(held, 1, 1)
        return Pair(reader, holder, ours, theirs, held, start)

    return make
