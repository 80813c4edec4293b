"""Folders that may have the attach socket, and its replacement."""

import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvbus.errors import ConfigError
from kvbus.memory.attach import ENGINE_SOCKET, check_folder, listening_at, prepare_folder

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


WRITABLE = "mkdir -m 700 -p shared/agent; chmod {} shared"
THROUGH = "mkdir -m 700 real; mkdir -m {} open; ln -s open/../real link"
MISTAKES = {  # what is there; the folder that is asked for; the refusal
    "others_can_enter": ("chmod 710 .", ".", r"mode 0710.*chmod 0700"),
    "above_0770": (WRITABLE.format("770"), "shared/agent", "shared has mode 0770: .*chmod go-w"),
    "above_0702": (WRITABLE.format("702"), "shared/agent", "shared has mode 0702: .*chmod go-w"),
    "a_link_in_its_place": ("mkdir -m 700 real; ln -s real link", "link", "link"),
    "a_link_to_an_open_one": ("mkdir -m 777 a; ln -s $PWD/a bad", "bad/agent", "a has mode 0777"),
    "a_link_through_an_open_one": (THROUGH.format("777"), "link/agent", "open has mode 0777"),
    "links_without_end": ("ln -s loop loop", "loop/agent", "too many links"),
    "a_file_in_its_place": ("touch file", "file", "cannot make|not a directory"),
    "a_file_above": ("touch file", "file/agent", "cannot make|not a directory"),
}


def made(folder: Path, commands: str) -> None:
    subprocess.run(["/bin/sh", "-c", f"umask 0; {commands}"], cwd=folder, check=True)


@pytest.mark.parametrize(("commands", "asked", "why"), MISTAKES.values(), ids=MISTAKES)
def test_folder_others_could_replace_is_refused_with_fix(
    folder: Path, commands: str, asked: str, why: str
) -> None:
    made(folder, commands)
    with pytest.raises(ConfigError, match=why):
        prepare_folder(folder / asked)


@pytest.mark.parametrize(
    ("commands", "asked"),
    [
        ("", "deep/deeper/agent"),
        ("mkdir -m 1777 tmp", "tmp/agent"),
        (THROUGH.format("755"), "link/agent"),
    ],
    ids=["missing", "sticky", "a link of ours"],
)
def test_safe_folder_is_made_for_owner_alone(folder: Path, commands: str, asked: str) -> None:
    made(folder, commands)
    there_before = set(folder.rglob("*"))
    umask = os.umask(0)
    try:
        prepare_folder(folder / asked)
    finally:
        os.umask(umask)
    check_folder(folder / asked)
    assert {mode_of(path) for path in set(folder.rglob("*")) - there_before} == {0o700}


@as_root
@pytest.mark.parametrize("asked", ["first", "first/agent", "first/deep/agent", "link/agent"])
def test_what_another_user_made_first_is_refused_by_its_owner(folder: Path, asked: str) -> None:
    made(folder, f"mkdir -m 700 first; ln -s $PWD link; chown -h {NOBODY} first link")
    for act in (prepare_folder, check_folder):
        name = asked.partition("/")[0]
        with pytest.raises(ConfigError, match=f"{name} belongs to uid {NOBODY}"):
            act(folder / asked)
    assert list((folder / "first").iterdir()) == []
    with pytest.raises(ConfigError, match=f"first belongs to uid {NOBODY}.*runtime_dir"):
        prepare_folder(folder / "first")


def test_private_socket_replaces_dead_one_and_is_removed_at_end(folder: Path) -> None:
    path = folder / "attach.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    with listening_at(path), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        (folder / ENGINE_SOCKET).touch()  # ZeroMQ's
        assert mode_of(path) == 0o600
    assert {one.name for one in folder.iterdir()} == {"attach.sock.lock"}


@contextmanager
def starting_agent(path: Path) -> Iterator[None]:
    """An agent whose socket is not there yet."""
    with listening_at(path):
        path.unlink()
        yield
        path.touch()


@contextmanager
def listener(path: Path, *, is_full: bool = False) -> Iterator[None]:
    """A program without our lock, and perhaps one that waits for it."""
    with socket.socket(socket.AF_UNIX) as foreign, socket.socket(socket.AF_UNIX) as waiting:
        foreign.bind(str(path))
        foreign.listen(0)
        if is_full:
            waiting.connect(str(path))
        yield


@contextmanager
def file(path: Path) -> Iterator[None]:
    path.write_text("precious")
    yield
    assert path.read_text() == "precious"


@pytest.mark.usefixtures("nothing_leaks")
@pytest.mark.parametrize(
    ("what", "why"),
    [
        (listening_at, r"alive at .*attach\.sock"),
        (starting_agent, "alive"),
        (listener, "alive"),
        (partial(listener, is_full=True), "alive"),
        (file, "not a socket"),
    ],
)
def test_what_is_in_the_way_is_refused_by_name_and_stays(
    folder: Path, what: Callable[[Path], AbstractContextManager[object]], why: str
) -> None:
    path = folder / "attach.sock"
    with what(path):
        is_there = path.exists()
        with pytest.raises(ConfigError, match=why), listening_at(path):
            pass
        assert path.exists() == is_there


def test_path_over_linux_limit_is_refused(folder: Path) -> None:
    longest = folder / ("x" * (107 - len(os.fsencode(folder)) - 1))
    with listening_at(longest):
        assert longest.is_socket()
    with pytest.raises(ConfigError, match="108 bytes; Linux allows 107"):
        listening_at(folder / f"{longest.name}x").__enter__()
