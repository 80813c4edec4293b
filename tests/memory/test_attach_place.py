"""Where the attach socket may be, who may take its place, and how it is handed over."""

import os
import socket
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kvbus.errors import ConfigError
from kvbus.memory.attach import (
    NUM_SEATS,
    AttachClient,
    AttachPlace,
    AttachServer,
    Seat,
    check_folder,
    prepare_folder,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
WITHIN_S = 60.0


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_every_folder_that_is_missing_is_made_for_us_alone(folder: Path) -> None:
    below = folder / "deep" / "deeper" / "agent"
    before = os.umask(0)
    try:
        prepare_folder(below)
    finally:
        os.umask(before)

    assert [mode_of(path) for path in (below, *below.parents[:2])] == [0o700] * 3
    check_folder(below)


WRITABLE = "mkdir -m 700 -p shared/agent; chmod {} shared"
MISTAKES = {  # what is there; the folder that is asked for; the refusal
    "others_can_enter": ("chmod 710 .", ".", r"mode 0710.*chmod 0700"),
    "above_0770": (WRITABLE.format("770"), "shared/agent", "shared has mode 0770: .*chmod go-w"),
    "above_0702": (WRITABLE.format("702"), "shared/agent", "shared has mode 0702: .*chmod go-w"),
    "above_0777": (WRITABLE.format("777"), "shared/agent", "shared has mode 0777: .*chmod go-w"),
    "a_link_in_its_place": ("mkdir -m 700 real; ln -s real link", "link", "link"),
    "a_link_to_an_open_one": ("mkdir -m 777 a; ln -s $PWD/a bad", "bad/agent", "a has mode 0777"),
    "a_link_through_an_open_one": (
        "mkdir -m 700 real; mkdir -m 777 open; ln -s open/../real link",
        "link/agent",
        "open has mode 0777",
    ),
    "links_without_end": ("ln -s loop loop", "loop/agent", "too many links"),
    "a_file_in_its_place": ("touch file", "file", "cannot make|not a directory"),
    "a_file_above": ("touch file", "file/agent", "cannot make|not a directory"),
}


def made(folder: Path, commands: str) -> None:
    subprocess.run(["/bin/sh", "-c", f"umask 0; {commands}"], cwd=folder, check=True)


@pytest.mark.parametrize("case", MISTAKES)
def test_a_folder_whose_place_others_could_take_is_refused_with_what_mends_it(
    folder: Path, case: str
) -> None:
    commands, asked, why = MISTAKES[case]
    made(folder, commands)

    with pytest.raises(ConfigError, match=why):
        prepare_folder(folder / asked)


@pytest.mark.parametrize(
    ("commands", "asked"),
    [
        ("mkdir -m 1777 tmp", "tmp/agent"),
        ("mkdir -m 755 open; mkdir -m 700 real; ln -s open/../real link", "link/agent"),
    ],
    ids=["sticky", "a link of ours"],
)
def test_a_folder_whose_place_nobody_else_can_take_is_made(
    folder: Path, commands: str, asked: str
) -> None:
    made(folder, commands)

    prepare_folder(folder / asked)

    check_folder(folder / asked)


@as_root
@pytest.mark.parametrize("asked", ["first", "first/agent", "first/deep/agent", "link/agent"])
def test_what_another_user_made_first_is_refused_by_its_owner(folder: Path, asked: str) -> None:
    made(folder, f"mkdir -m 700 first; ln -s $PWD link; chown -h {NOBODY} first link")
    name = asked.partition("/")[0]
    for act in (prepare_folder, check_folder):
        with pytest.raises(ConfigError, match=f"{name} belongs to uid {NOBODY}"):
            act(folder / asked)

    assert list((folder / "first").iterdir()) == []
    with pytest.raises(ConfigError, match=f"first belongs to uid {NOBODY}.*runtime_dir"):
        prepare_folder(folder / "first")


def test_the_directory_is_made_for_us_alone_and_so_is_the_socket(folder: Path) -> None:
    path = folder / "deep" / "agent" / "attach.sock"
    with AttachPlace.take(path):
        assert mode_of(path.parent) == 0o700
        assert mode_of(path) == 0o600

    assert not path.exists()


def test_a_dead_agents_socket_file_is_replaced(folder: Path) -> None:
    path = folder / "attach.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    dead.close()
    with AttachPlace.take(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_agents_path_is_refused_by_name_and_its_socket_stays(
    folder: Path, num_open_fds: Callable[[], int]
) -> None:
    path = folder / "attach.sock"
    with AttachPlace.take(path), socket.socket(socket.AF_UNIX) as client:
        before = num_open_fds()
        with pytest.raises(ConfigError, match=r"alive at .*attach\.sock"), AttachPlace.take(path):
            pass

        assert num_open_fds() == before
        client.connect(str(path))


@pytest.mark.parametrize("queue_is_full", [False, True])
def test_a_live_listener_without_our_lock_is_refused_too(folder: Path, queue_is_full: bool) -> None:
    path = folder / "attach.sock"
    with socket.socket(socket.AF_UNIX) as foreign, socket.socket(socket.AF_UNIX) as waiting:
        foreign.bind(str(path))
        foreign.listen(0)
        if queue_is_full:
            waiting.connect(str(path))
        with pytest.raises(ConfigError, match="alive"), AttachPlace.take(path):
            pass

        assert path.is_socket()


def test_an_agent_that_is_still_starting_keeps_its_place_before_its_socket_is_there(
    folder: Path,
) -> None:
    path = folder / "attach.sock"
    with AttachPlace.take(path):
        path.unlink()  # as it is before bind
        with pytest.raises(ConfigError, match="alive"), AttachPlace.take(path):
            pass


def test_a_file_that_is_no_socket_is_never_removed(folder: Path) -> None:
    path = folder / "attach.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"), AttachPlace.take(path):
        pass

    assert path.read_text() == "precious"


@pytest.mark.parametrize(("num_bytes", "fits"), [(107, True), (108, False)])
def test_a_path_longer_than_linux_allows_is_refused_with_its_length(
    folder: Path, num_bytes: int, fits: bool
) -> None:
    path = folder / ("x" * (num_bytes - len(os.fsencode(folder)) - 1))
    if fits:
        with AttachPlace.take(path):
            assert path.is_socket()
    else:
        with pytest.raises(ConfigError, match="108 bytes; Linux allows 107"):
            AttachPlace.take(path).__enter__()


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


@pytest.mark.anyio
async def test_who_connected_before_is_let_in_by_the_old_one_and_who_comes_then_by_the_new_one(
    folder: Path,
) -> None:
    path = folder / "attach.sock"
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


@pytest.mark.anyio
async def test_a_server_that_resumes_lets_in_those_who_came_meanwhile(folder: Path) -> None:
    path = folder / "attach.sock"
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


def test_the_lock_and_the_file_stay_until_the_last_of_two_has_closed(folder: Path) -> None:
    path = folder / "attach.sock"
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


def test_two_agents_of_a_folder_have_seats_of_their_own(folder: Path) -> None:
    with Seat.take(folder) as first:
        with Seat.take(folder) as second:
            assert (first.folder, second.folder) == (folder, folder / "2")
            assert second.folder.stat().st_mode & 0o777 == 0o700
        with Seat.take(folder) as third:
            assert third.folder == folder / "2"


def test_seats_are_bounded_and_free_again(folder: Path, num_open_fds: Any) -> None:
    before = num_open_fds()
    taken = [Seat.take(folder) for _ in range(NUM_SEATS)]
    with pytest.raises(ConfigError, match=str(folder)):
        Seat.take(folder)
    for seat in taken:
        with seat:
            pass

    assert num_open_fds() == before
    with Seat.take(folder) as again:
        assert again.folder == folder
