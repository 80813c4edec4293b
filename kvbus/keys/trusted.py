"""The folder of trusted public keys, as it is now: one small file for each.

Refuses to trust what it cannot read: a folder that is gone trusts nobody.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.keys.files import SUFFIX, TrustedKey, read_trusted, require_unwritable
from kvbus.protocol.message import Role

MAX_KEYS = 4096
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)

FolderStamp = tuple[int, int, int]
"""What changes when files come, go or are replaced: device, inode and time of the folder."""
Stamp = tuple[str, int, int, int]
"""What changes when a file does: name, inode, time and size."""


class TrustedKeys:
    """Who is trusted, as what; `refresh` looks whether the folder has changed.

    ``problems`` are the files that are left out, each with why. To refresh is for one thread at a
    time, which need not be that of those who ask.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: tuple[str, ...] = ()
        self._folder_stamp: FolderStamp | None = None
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
            return self._distrust_all(error)
        is_first, self._folder_stamp = self._folder_stamp is None, folder_stamp
        if stamps == list(self._files) and not is_first:
            return False
        self._files = {stamp: self._files.get(stamp) or self._read(stamp) for stamp in stamps}
        self._take(self._files.values())
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
        try:
            return read_trusted(self.folder / stamp[0])
        except ConfigError as error:
            return error

    def _take(self, files: Iterable[TrustedKey | ConfigError]) -> None:
        by_key: dict[str, list[TrustedKey]] = {}
        problems = []
        for one in files:
            if isinstance(one, ConfigError):
                problems.append(one.message)
            else:
                by_key.setdefault(one.key, []).append(one)
        self._by_key, self.problems = by_key, tuple(problems)

    def _distrust_all(self, error: OSError | ConfigError) -> bool:
        reason = error.message if isinstance(error, ConfigError) else error.strerror
        problems = (f"cannot read the folder {self.folder}: {reason}; nobody is trusted",)
        changed = problems != self.problems
        self._folder_stamp, self._files = None, {}
        self._by_key, self.problems = {}, problems
        return changed


def _roles(keys: Iterable[TrustedKey]) -> frozenset[Role]:
    return frozenset(role for one in keys for role in one.roles)
