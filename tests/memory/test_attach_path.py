"""Where the attach socket may be, and who may take its place."""

import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbus.errors import ConfigError
from kvbus.memory.attach import AttachPlace


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_directory_is_made_for_us_alone_and_so_is_the_socket(runtime_dir: Path) -> None:
    path = runtime_dir / "deep" / "agent" / "attach.sock"
    with AttachPlace.take(path):
        assert mode_of(path.parent) == 0o700
        assert mode_of(path) == 0o600

    assert not path.exists()


def test_a_dead_agents_socket_file_is_replaced(runtime_dir: Path) -> None:
    path = runtime_dir / "attach.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.listen()
    dead.close()
    with AttachPlace.take(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))


def test_a_live_agents_path_is_refused_by_name_and_its_socket_stays(
    runtime_dir: Path, num_open_fds: Callable[[], int]
) -> None:
    path = runtime_dir / "attach.sock"
    with AttachPlace.take(path), socket.socket(socket.AF_UNIX) as client:
        before = num_open_fds()
        with pytest.raises(ConfigError, match=r"alive at .*attach\.sock"), AttachPlace.take(path):
            pass

        assert num_open_fds() == before
        client.connect(str(path))


@pytest.mark.parametrize("queue_is_full", [False, True])
def test_a_live_listener_without_our_lock_is_refused_too(
    runtime_dir: Path, queue_is_full: bool
) -> None:
    path = runtime_dir / "attach.sock"
    with socket.socket(socket.AF_UNIX) as foreign, socket.socket(socket.AF_UNIX) as waiting:
        foreign.bind(str(path))
        foreign.listen(0)
        if queue_is_full:
            waiting.connect(str(path))
        with pytest.raises(ConfigError, match="alive"), AttachPlace.take(path):
            pass

        assert path.is_socket()


def test_an_agent_that_is_still_starting_keeps_its_place_before_its_socket_is_there(
    runtime_dir: Path,
) -> None:
    path = runtime_dir / "attach.sock"
    with AttachPlace.take(path):
        path.unlink()  # as it is before bind
        with pytest.raises(ConfigError, match="alive"), AttachPlace.take(path):
            pass


def test_a_file_that_is_no_socket_is_never_removed(runtime_dir: Path) -> None:
    path = runtime_dir / "attach.sock"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"), AttachPlace.take(path):
        pass

    assert path.read_text() == "precious"


@pytest.mark.parametrize(("num_bytes", "fits"), [(107, True), (108, False)])
def test_a_path_longer_than_linux_allows_is_refused_with_its_length(
    runtime_dir: Path, num_bytes: int, fits: bool
) -> None:
    path = runtime_dir / ("x" * (num_bytes - len(os.fsencode(runtime_dir)) - 1))
    if fits:
        with AttachPlace.take(path):
            assert path.is_socket()
    else:
        with pytest.raises(ConfigError, match="108 bytes; Linux allows 107"):
            AttachPlace.take(path).__enter__()
