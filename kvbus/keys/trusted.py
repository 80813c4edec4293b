"""The folder of trusted public keys, as it is now: one small file for each.

Refuses to trust what it cannot read: a folder that is gone trusts nobody.
"""

from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.keys.files import SUFFIX, TrustedKey, read_trusted, require_unwritable
from kvbus.keys.roles import Role

MAX_KEYS = 4096

Stamp = tuple[str, int, int, int]
"""What changes when a file does: name, inode, time and size."""


class TrustedKeys:
    """Who is trusted, as what; `refresh` looks whether the folder has changed.

    ``problems`` are the files that are left out, each with why.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: tuple[str, ...] = ()
        self._stamps: list[Stamp] | None = None
        self._changed_ns = 0
        self._by_key: dict[str, list[TrustedKey]] = {}

    def __iter__(self) -> Iterator[TrustedKey]:
        every = (one for keys in self._by_key.values() for one in keys)
        return iter(sorted(every, key=attrgetter("name")))

    def roles_of(self, key: str) -> frozenset[Role]:
        """What the key is trusted as; nothing for one that is not trusted."""
        return frozenset(role for one in self._by_key.get(key, ()) for role in one.roles)

    def name_of(self, key: str) -> str:
        """The name of the key, for logs; empty for one that is not trusted."""
        return next((one.name for one in self._by_key.get(key, ())), "")

    def has_other_files(self) -> bool:
        """Whether files came, went or were replaced since `refresh`; cheap, for each handshake."""
        try:
            return self.folder.stat().st_mtime_ns != self._changed_ns
        except OSError:
            return True

    def refresh(self) -> bool:
        """Read the folder again if anything in it has changed; returns whether it had."""
        try:
            stamps = self._look()
        except (OSError, ConfigError) as error:
            return self._distrust_all(error)
        if stamps == self._stamps:
            return False
        self._stamps = stamps
        self._read([self.folder / name for name, *_ in stamps])
        return True

    def _look(self) -> list[Stamp]:
        status = self.folder.stat()
        require_unwritable(self.folder, status)
        self._changed_ns = status.st_mtime_ns
        found = []
        for path in self.folder.iterdir():
            if path.suffix == SUFFIX:
                with suppress(FileNotFoundError):  # it went just now: the others stay
                    one = path.stat()
                    found.append((path.name, one.st_ino, one.st_mtime_ns, one.st_size))
        if len(found) > MAX_KEYS:
            raise ConfigError(f"{self.folder} has {len(found)} keys; {MAX_KEYS} are the most")
        return sorted(found)

    def _distrust_all(self, error: OSError | ConfigError) -> bool:
        reason = error.message if isinstance(error, ConfigError) else error.strerror
        problems = (f"cannot read the folder {self.folder}: {reason}; nobody is trusted",)
        changed = problems != self.problems
        self._stamps, self._by_key, self.problems = None, {}, problems
        return changed

    def _read(self, paths: list[Path]) -> None:
        by_key: dict[str, list[TrustedKey]] = {}
        problems = []
        for path in paths:
            try:
                trusted = read_trusted(path)
            except ConfigError as error:
                problems.append(error.message)
            else:
                by_key.setdefault(trusted.key, []).append(trusted)
        self._by_key, self.problems = by_key, tuple(problems)
