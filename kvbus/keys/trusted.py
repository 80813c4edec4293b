"""The folder of trusted public keys, as it is now: one small file for each.

What cannot be read is not trusted: a folder that is gone trusts nobody.
"""

import errno
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.keys.files import create, public_key_of, read_fields, require_unwritable
from kvbus.protocol.message import Role

SUFFIX = ".toml"
MAX_KEYS = 4096
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

Stamp = tuple[str, int, int, int]
"""What changes when a file does: name, inode, time and size."""


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key, the name that its file gives it, and what it is trusted as."""

    name: str
    key: str
    roles: frozenset[Role]


def write_trusted(folder: Path, trusted: TrustedKey) -> Path:
    """A new file in the folder; raises `ConfigError`, also when the name is taken."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    path, roles = folder / f"{trusted.name}{SUFFIX}", json.dumps(sorted(trusted.roles))
    create(path, f"public_key = {json.dumps(trusted.key)}\nroles = {roles}\n", 0o644)
    return path


def roles_of(where: str, names: object) -> frozenset[Role]:
    """The roles of a list of names; raises `ConfigError` that begins with ``where``."""
    if not isinstance(names, list) or not names:
        raise ConfigError(f'{where}: roles is not a list such as ["decode"]')
    for name in names:
        if name not in list(Role):
            known = ", ".join(Role)
            raise ConfigError(f"{where}: there is no role {name!r}; there are {known}")
    return frozenset(map(Role, names))


class TrustedKeys:
    """Who is trusted, as what; `refresh` looks whether the folder has changed.

    ``problems`` are the files that are left out, each with why. To refresh is for one thread at a
    time, which need not be that of those who ask.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: tuple[str, ...] = ()
        self._folder_stamp: tuple[int, ...] | None = None
        self._files: dict[Stamp, TrustedKey | ConfigError] = {}
        self._by_key: dict[str, list[TrustedKey]] = {}

    def __iter__(self) -> Iterator[TrustedKey]:
        every = (one for keys in self._by_key.values() for one in keys)
        return iter(sorted(every, key=attrgetter("name")))

    def roles_of(self, key: str) -> frozenset[Role]:
        """What the key is trusted as; nothing for one that is not trusted."""
        return _roles(self._by_key.get(key, ()))

    def name_of(self, key: str) -> str:
        """The name of the key, for logs; empty for one that is not trusted."""
        return next((one.name for one in self._by_key.get(key, ())), "")

    def refresh(self, *, files: bool = True) -> bool:
        """Read what has changed; returns whether anything had.

        Without ``files`` the folder alone is looked at, which does not show a file that was edited
        in place.
        """
        try:
            status = self.folder.stat()
            require_unwritable(self.folder, status)
            folder_stamp = status.st_dev, status.st_ino, status.st_ctime_ns
            if folder_stamp == self._folder_stamp and not files:
                return False
            stamps = self._stamps()
        except (OSError, ConfigError) as error:
            if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
                return False  # that says nothing of the keys
            reason = error.message if isinstance(error, ConfigError) else error.strerror
            before, self._folder_stamp, self._files = self.problems, None, {}
            self._take(f"cannot read the folder {self.folder}: {reason}; nobody is trusted")
            return self.problems != before
        is_first, self._folder_stamp = self._folder_stamp is None, folder_stamp
        if stamps == list(self._files) and not is_first:
            return False
        self._files = {stamp: self._files.get(stamp) or self._read(stamp) for stamp in stamps}
        self._take()
        return True

    def lost(self, *, files: bool) -> frozenset[str] | None:
        """Refresh; returns the keys that lost a role by it, or None when nothing has changed."""
        before = self._by_key
        if not self.refresh(files=files):
            return None
        return frozenset(key for key, had in before.items() if _roles(had) - self.roles_of(key))

    def _stamps(self) -> list[Stamp]:
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):  # it went just now: the others stay
                        one = entry.stat()
                        found.append((entry.name, one.st_ino, one.st_ctime_ns, one.st_size))
        if len(found) > MAX_KEYS:
            raise ConfigError(f"{self.folder} has {len(found)} keys; {MAX_KEYS} are the most")
        return sorted(found)

    def _read(self, stamp: Stamp) -> TrustedKey | ConfigError:
        path = self.folder / stamp[0]
        try:
            fields = read_fields(path, require_unwritable)
            for unknown in sorted(fields.keys() - {"public_key", "roles"}):
                raise ConfigError(f"{path}: key '{unknown}' is not known; public_key and roles are")
            key = public_key_of(path, fields)
            return TrustedKey(path.stem, key, roles_of(str(path), fields.get("roles")))
        except ConfigError as error:
            return error

    def _take(self, *problems: str) -> None:
        by_key = defaultdict[str, list[TrustedKey]](list)
        for one in self._files.values():
            if isinstance(one, ConfigError):
                problems += (one.message,)
            else:
                by_key[one.key].append(one)
        self._by_key, self.problems = dict(by_key), problems


def _roles(keys: Iterable[TrustedKey]) -> frozenset[Role]:
    return frozenset(role for one in keys for role in one.roles)
