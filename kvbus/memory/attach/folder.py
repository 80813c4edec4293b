"""Owns the folder of an agent's sockets: nobody but its user can put another in its place.

Refuses a folder that others can enter, and any on the way to it that others could rename.
"""

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from kvbus.errors import ConfigError

_MOST_LINKS = 40  # as Linux
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


# A folder is only as safe as those above it: who may write into one of them may rename what is in
# it, and put a folder of his own there. So the way is walked from the root down, name by name:
#
#     /             root's, nobody else writes      ok
#     /tmp          anybody writes, sticky          ok: only its owner renames what is in there
#     /tmp/kvbus-7  of root or of this user?        somebody else may have made it first: refused
#     .../one       this user's, 0700               what is in there is ours
#
# Each name is looked at when nobody can change it any more, as all above it were found safe. A link
# is followed by hand, so that the folders on its way are looked at too.
def prepare_folder(folder: Path) -> None:
    """Make the folder with mode 0700, and what is missing above it; as `check_folder`."""
    try:
        _walk(folder, make=True)
    except OSError as error:
        raise ConfigError(
            f"cannot make the runtime directory {folder}: {error.strerror}"
        ) from error


def check_folder(folder: Path) -> None:
    """Raise ``ConfigError`` unless the folder is ours alone, and nobody else can replace it."""
    try:
        _walk(folder, make=False)
    except OSError as error:
        raise ConfigError(f"cannot see the runtime directory {folder}: {error.strerror}") from error


def _walk(folder: Path, *, make: bool) -> None:
    folder = folder.absolute()
    at, ahead, num_links = Path("/"), list(folder.parts[1:]), 0
    _check_way(at, at.lstat())
    while ahead:
        name = ahead.pop(0)
        if name == os.pardir:
            at = at.parent
            continue
        status = _status(at / name, make=make)
        _check_way(at / name, status)
        if not stat.S_ISLNK(status.st_mode):
            at /= name
            continue
        num_links += 1
        if num_links > _MOST_LINKS:
            raise ConfigError(f"the runtime directory {folder} has too many links on its way")
        at, ahead = _followed(at, name, ahead)
    _check_last(folder, folder.lstat())


def _status(path: Path, *, make: bool) -> os.stat_result:
    if make and not os.path.lexists(path):
        path.mkdir(mode=0o700, exist_ok=True)  # somebody may be faster: what is there is looked at
    return path.lstat()


def _followed(at: Path, name: str, ahead: Sequence[str]) -> tuple[Path, list[str]]:
    target = (at / name).readlink()
    if target.is_absolute():
        return Path("/"), [*target.parts[1:], *ahead]
    return at, [*target.parts, *ahead]


def _check_way(path: Path, status: os.stat_result) -> None:
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
