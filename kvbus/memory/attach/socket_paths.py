"""Sockets of an agent, which only its own user can replace."""

import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

from kvbus.errors import ConfigError, ErrorCode, PeerLost, RequestRefused

MAX_PATH_BYTES = 107  # sun_path without its NUL
_BACKLOG = 64
ENGINE_SOCKET = "engine.sock"
"""ZeroMQ binds it."""
_CREDENTIALS = struct.Struct("iII")
_MOST_LINKS = 40  # the limit of Linux
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


@contextmanager
def listening_at(path: Path) -> Iterator[socket.socket]:
    """Only a dead agent's socket file is replaced: its lock is free. Raises ``ConfigError``.

    The lock also covers the agent's other socket in the folder.
    """
    check_path_length(path)
    prepare_folder(path.parent)
    with _locked(path.with_name(path.name + ".lock"), path), _bound(path) as listener:
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)
            path.with_name(ENGINE_SOCKET).unlink(missing_ok=True)  # ZeroMQ leaves it behind


def check_path_length(path: Path) -> None:
    num_bytes = len(os.fsencode(path))
    if num_bytes > MAX_PATH_BYTES:
        raise ConfigError(
            f"attach path {path} has {num_bytes} bytes; Linux allows {MAX_PATH_BYTES}: choose a "
            "shorter runtime directory"
        )


def _locked(lock: Path, path: Path) -> IO[bytes]:
    """The file stays: removal would race with the next agent."""
    try:
        opened = lock.open("ab")
    except OSError as error:
        raise ConfigError(f"cannot make the lock file {lock}: {error.strerror}") from error
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        opened.close()
        raise _in_use(path) from None
    return opened


def _bound(path: Path) -> socket.socket:
    _remove_stale_file(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        path.chmod(0o600)  # no process can connect before it listens
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror}") from error
    return listener


def _remove_stale_file(path: Path) -> None:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(status.st_mode):
        raise ConfigError(f"attach path {path} is taken by a file that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        with suppress(ConnectionRefusedError):
            try:
                probe.connect(str(path))
            except BlockingIOError as error:  # it listens, and its queue is full
                raise _in_use(path) from error
            raise _in_use(path)
    path.unlink()


def _in_use(path: Path) -> ConfigError:
    return ConfigError(f"another agent is alive at {path}: stop it, or choose another path")


def connect_to_agent(path: Path) -> socket.socket:
    """Check the listener's user before anything is sent.

    Raises ``PeerLost``, ``RequestRefused`` (busy), and ``ConfigError`` for another user, even root.
    """
    check_path_length(path)
    with ExitStack() as stack:
        connected = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        connected.setblocking(False)
        try:
            connected.connect(str(path))
        except BlockingIOError as error:
            raise RequestRefused(f"the agent at {path} is busy", code=ErrorCode.BUSY) from error
        except OSError as error:
            raise PeerLost(f"no agent at {path}: {error.strerror}") from error
        agent = PeerIdentity.of(connected)
        if agent.uid != os.geteuid():
            raise ConfigError(
                f"the process that listens at {path} has uid {agent.uid} (pid {agent.pid}), not "
                f"ours ({os.geteuid()}): no memory is passed; run both as one user, and check "
                "which process created that socket",
                uid=agent.uid,
                pid=agent.pid,
            )
        stack.pop_all()
    return connected


class PeerIdentity(NamedTuple):
    """Credentials of a process when it connected, or began to listen."""

    pid: int
    uid: int
    gid: int

    @classmethod
    def of(cls, connected: socket.socket) -> "PeerIdentity":
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return cls(*_CREDENTIALS.unpack(credentials))


# A folder is only as safe as its parents: a user who can write to a parent can rename the folder
# and put another in its place. So the path is checked from the root down, entry by entry:
#
#     /             root's, others cannot write      ok
#     /tmp          all can write, sticky            ok: only the owner of an entry can rename it
#     /tmp/kvbus-7  of root or of this user?         another user may have made it first: refused
#     .../one       this user's, 0700                its content is ours
#
# All parents of an entry are safe before it is checked, so no other user can change it. Links are
# followed by hand, so that the folders on their way are checked, too.
def prepare_folder(folder: Path) -> None:
    _walk(folder, make=True)


def check_folder(folder: Path) -> None:
    """Raise ``ConfigError`` unless only this user can enter or replace it."""
    _walk(folder, make=False)


def _walk(folder: Path, *, make: bool) -> None:
    try:
        _check_entries(folder.absolute(), make=make)
        _check_last(folder, folder.lstat())
    except OSError as error:
        verb = "make" if make else "see"
        raise ConfigError(
            f"cannot {verb} the runtime directory {folder}: {error.strerror}"
        ) from error


def _check_entries(path: Path, *, make: bool, num_links: int = 0) -> None:
    if num_links > _MOST_LINKS:
        raise ConfigError(f"the way to the runtime directory has too many links: {path}")
    for at in (*reversed(path.parents), path):
        if make and not os.path.lexists(at):
            at.mkdir(mode=0o700, exist_ok=True)  # another process may be faster: checked below
        status = at.lstat()
        _check_entry(at, status)
        if stat.S_ISLNK(status.st_mode):
            _check_entries(at.parent / at.readlink(), make=make, num_links=num_links + 1)


def _check_entry(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path} belongs to uid {status.st_uid}, neither to us ({os.geteuid()}) nor to root: "
            "its owner could take the place of an agent; remove it, or set runtime_dir to a path "
            "of folders of this user",
            uid=status.st_uid,
        )
    if stat.S_ISLNK(status.st_mode) or status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & _WRITABLE_BY_OTHERS and stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{path} has mode {_mode(status):04o}: others could take the place of an agent below "
            f"it; run 'chmod go-w {path}', or 'chmod +t {path}' if they have to write there"
        )


def _check_last(folder: Path, status: os.stat_result) -> None:
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"the runtime directory {folder} is a link or not a directory")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"the runtime directory {folder} belongs to uid {status.st_uid}, not to us "
            f"({os.geteuid()}): run as that user, or set another runtime_dir"
        )
    if _mode(status) & 0o077:
        raise ConfigError(
            f"the runtime directory {folder} has mode {_mode(status):04o}: others must not enter "
            f"it; run 'chmod 0700 {folder}'"
        )


def _mode(status: os.stat_result) -> int:
    return stat.S_IMODE(status.st_mode)
