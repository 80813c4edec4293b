"""Where the attach socket may be, who may take its place, and how it is handed over."""

import os
import socket
import stat
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


def test_a_folder_that_others_can_enter_is_refused_with_the_command_that_mends_it(
    folder: Path,
) -> None:
    folder.chmod(0o710)
    with pytest.raises(ConfigError, match=r"mode 0710.*chmod 0700"):
        prepare_folder(folder)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_above_that_others_write_into_is_refused(folder: Path, mode: int) -> None:
    (folder / "shared").mkdir()
    (folder / "shared" / "agent").mkdir(mode=0o700)
    (folder / "shared").chmod(mode)
    with pytest.raises(ConfigError, match=rf"shared has mode {mode:04o}: .*chmod go-w"):
        prepare_folder(folder / "shared" / "agent")


def test_a_folder_above_that_others_write_into_may_be_sticky(folder: Path) -> None:
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)

    prepare_folder(folder / "tmp" / "agent")


def test_a_link_in_place_of_the_folder_is_refused(folder: Path) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="link"):
        prepare_folder(folder / "link")


def test_a_link_of_ours_on_the_way_is_followed_and_its_folders_are_looked_at(
    folder: Path,
) -> None:
    (folder / "real").mkdir(mode=0o700)
    (folder / "open").mkdir()
    (folder / "open").chmod(0o777)
    (folder / "link").symlink_to("open/../real")
    (folder / "bad").symlink_to(folder / "open")

    with pytest.raises(ConfigError, match="open has mode 0777"):
        prepare_folder(folder / "bad" / "agent")
    with pytest.raises(ConfigError, match="open has mode 0777"):
        prepare_folder(folder / "link" / "agent")
    (folder / "open").chmod(0o755)
    prepare_folder(folder / "link" / "agent")


def test_links_that_lead_nowhere_else_end(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="too many links"):
        prepare_folder(folder / "loop" / "agent")


@pytest.mark.parametrize("below", [".", "agent"])
def test_a_file_in_place_of_a_folder_is_refused(folder: Path, below: str) -> None:
    (folder / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make|not a directory"):
        prepare_folder(folder / "file" / below)


@as_root
@pytest.mark.parametrize("below", [".", "agent", "deep/agent"])
def test_a_folder_that_another_user_made_first_is_refused_by_its_owner(
    folder: Path, below: str
) -> None:
    (folder / "first").mkdir(mode=0o700)
    os.chown(folder / "first", NOBODY, NOBODY)
    for act in (prepare_folder, check_folder):
        with pytest.raises(ConfigError, match=f"first belongs to uid {NOBODY}.*runtime_dir"):
            act(folder / "first" / below)

    assert list((folder / "first").iterdir()) == []


@as_root
def test_a_link_that_another_user_made_first_is_refused(folder: Path) -> None:
    (folder / "link").symlink_to(folder)
    os.chown(folder / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"link belongs to uid {NOBODY}"):
        prepare_folder(folder / "link" / "agent")


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
