"""A connection that is kept: opened and registered again after a loss, and left at the end."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

import anyio
import pytest

from kvbus.engine import Connection, ReconnectingConnection
from kvbus.errors import ClosedError, ErrorCode, PeerLost
from tests.support.agents import until
from tests.unit.engine.recording import SPEC

pytestmark = pytest.mark.anyio

GONE, NOT_YET = PeerLost("the agent is gone"), PeerLost("nobody listens yet")


class Nowhere(Connection):
    """A connection with nobody; ``failures`` come first."""

    def __init__(self, connections: "Connections") -> None:
        super().__init__("/nowhere", SPEC.engine_id)
        self._connections = connections
        self.is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.is_closed = True


class Connections:
    """Makes connections with nobody, and keeps what was done with them."""

    def __init__(self, *failures: Exception) -> None:
        self.all: list[Nowhere] = []
        self.registered: list[Connection] = []
        self.opened: list[Connection] = []
        self.failures = list(failures)
        self.num_changes = 0
        self.keeper = ReconnectingConnection(
            self.connect,
            self.register,
            name="the session",
            on_open=self.opened.append,
            on_change=self.note_change,
            logger=logging.getLogger("kvbus.engine"),
        )

    def connect(self) -> Nowhere:
        self.all.append(made := Nowhere(self))
        return made

    async def register(self, connection: Connection) -> None:
        assert self.keeper.problem is not None, "it is not there before it can be used"
        self.registered.append(connection)
        if self.failures:
            raise self.failures.pop(0)

    def note_change(self) -> None:
        self.num_changes += 1

    async def is_open(self, times: int) -> Nowhere:
        await until(lambda: len(self.opened) == times)
        return self.all[-1]


@asynccontextmanager
async def keeping(*failures: Exception) -> AsyncIterator[Connections]:
    connections = Connections(*failures)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(connections.keeper.run)
        yield connections
        tasks.cancel_scope.cancel()


async def test_connection_is_registered_and_so_is_each_after_a_loss() -> None:
    """What cannot be registered is tried with the next one."""
    async with keeping(NOT_YET) as connections:
        first = await connections.is_open(1)
        connections.failures.append(NOT_YET)
        first._lose(GONE)
        await until(lambda: connections.keeper.problem is not None)
        assert connections.keeper.latest is first
        second = await connections.is_open(2)

        failed, _, not_registered, _ = connections.all
        assert connections.registered == [failed, first, not_registered, second]
        assert connections.opened == [first, second]
        assert [one.is_closed for one in connections.all] == [True, True, True, False]
        assert (connections.keeper.problem, connections.keeper.num_opened) == (None, 2)
        assert connections.num_changes == 5


async def test_a_fault_of_a_registration_is_told_and_tried_again() -> None:
    async with keeping(ValueError("a fault")) as connections:
        await until(lambda: connections.keeper.has_failed)
        problem = connections.keeper.problem
        await connections.is_open(1)

    assert problem is not None
    assert (problem.code, problem.message) == (ErrorCode.INTERNAL, "a fault")


async def test_leaving_closes_the_connection_and_says_so() -> None:
    async with keeping() as connections:
        connection = await connections.is_open(1)

    assert connection.is_closed
    assert isinstance(connections.keeper.problem, ClosedError)
    assert not Connections().keeper.has_failed
    with pytest.raises(ClosedError, match="not open yet"):
        _ = Connections().keeper.latest
