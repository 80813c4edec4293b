"""A place that is handed over: who connects is let in by one of the two, and sees that one."""

import socket
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.errors import ConfigError
from kvbus.memory.attach import NUM_SEATS, AttachClient, AttachPlace, AttachServer, Seat

pytestmark = pytest.mark.anyio
WITHIN_S = 30.0


class Named:
    """A server whose answers say which one it is."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.server = AttachServer(path, self._answer, lambda _: None)

    async def _answer(self, *_: object) -> dict[str, Any]:
        return {"name": self.name}


async def name_of(client: AttachClient) -> str:
    with anyio.fail_after(WITHIN_S):
        return str((await client.call({"op": "who"}))["name"])


async def test_who_connected_before_is_let_in_by_the_old_one_and_who_comes_then_by_the_new_one(
    runtime_dir: Path,
) -> None:
    path = runtime_dir / "attach.sock"
    old, new = Named("old", path), Named("new", path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(old.server.serve)
        place = old.server.place
        assert place is not None
        taken = AttachPlace.of_fds(path, place.fds())
        place.is_shared = True
        async with AttachClient(path) as early:  # in the queue: the old server had no turn yet
            old.server.pause()
            async with AttachClient(path) as late:
                await tasks.start(new.server.serve, taken)

                assert await name_of(early) == "old"
                assert await name_of(late) == "new"
        old.server.resume()
        tasks.cancel_scope.cancel()


async def test_a_server_that_resumes_lets_in_those_who_came_meanwhile(runtime_dir: Path) -> None:
    path = runtime_dir / "attach.sock"
    old = Named("old", path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(old.server.serve)
        old.server.pause()
        async with AttachClient(path) as client:
            with anyio.move_on_after(0.2):
                await name_of(client)
                pytest.fail("it was let in")
        old.server.resume()
        async with AttachClient(path) as client:
            assert await name_of(client) == "old"
        tasks.cancel_scope.cancel()


def test_the_lock_and_the_file_stay_until_the_last_of_two_has_closed(runtime_dir: Path) -> None:
    path = runtime_dir / "attach.sock"
    with AttachPlace.take(path) as first:
        second = AttachPlace.of_fds(path, first.fds())
        first.is_shared = True

    with second, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        with pytest.raises(ConfigError, match="--replace"):
            AttachPlace.take(path)
    assert not path.exists()
    with AttachPlace.take(path):
        pass


def test_two_agents_of_a_folder_have_seats_of_their_own(runtime_dir: Path) -> None:
    with Seat.take(runtime_dir) as first:
        with Seat.take(runtime_dir) as second:
            assert (first.folder, second.folder) == (runtime_dir, runtime_dir / "2")
            assert second.folder.stat().st_mode & 0o777 == 0o700
        with Seat.take(runtime_dir) as third:
            assert third.folder == runtime_dir / "2"


def test_seats_are_bounded_and_free_again(runtime_dir: Path, num_open_fds: Any) -> None:
    before = num_open_fds()
    taken = [Seat.take(runtime_dir) for _ in range(NUM_SEATS)]
    with pytest.raises(ConfigError, match=str(runtime_dir)):
        Seat.take(runtime_dir)
    for seat in taken:
        with seat:
            pass

    assert num_open_fds() == before
    with Seat.take(runtime_dir) as again:
        assert again.folder == runtime_dir
