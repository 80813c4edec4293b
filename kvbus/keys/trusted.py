"""The file of trusted public keys: one line for each key, with name, roles and key.

    decode-0  decode,observer  -@rT4y{r9p&oQyQGlh2I-Ry18AU:N5cLRM=y[*ls

An invalid line is skipped. An unreadable file trusts no key.
"""

import errno
import fcntl
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbus.bus import require_key
from kvbus.errors import ConfigError
from kvbus.keys.files import read, replace, require_unwritable
from kvbus.protocol.message import Role

MAX_BYTES = 1 << 20
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    name: str
    key: str
    roles: frozenset[Role]

    def __str__(self) -> str:
        return f"{self.name}  {','.join(sorted(self.roles))}  {self.key}"

    @classmethod
    def read(cls, line: str) -> "TrustedKey":
        match line.split():
            case name, roles, key if not name.startswith("#"):
                require_key(key)
            case _:
                raise ConfigError("not NAME ROLE[,ROLE...] KEY")
        for role in roles.split(","):
            if role not in list(Role):
                raise ConfigError(f"there is no role {role!r}; there are {', '.join(Role)}")
        return cls(name, key, frozenset(map(Role, roles.split(","))))


Line = tuple[str, TrustedKey | ConfigError | None]
"""Its key or error; None for a comment or an empty line."""


def write_trusted(path: Path, trusted: TrustedKey) -> None:
    """Raise `ConfigError`, also if the name exists."""
    with _locked(path, create=True) as file:
        lines = _lines(file)
        if any(isinstance(one, TrustedKey) and one.name == trusted.name for _, one in lines):
            raise ConfigError(f"{path} has a key of the name {trusted.name!r} already")
        _replace(file, [*(text for text, _ in lines), str(trusted)])


def revoke_trusted(path: Path, key: str) -> list[TrustedKey]:
    with _locked(path) as file:
        lines = _lines(file)
        found = [one for _, one in lines if isinstance(one, TrustedKey)]
        revoked = [one for one in found if key in (one.name, one.key)]
        if revoked:
            _replace(file, [text for text, one in lines if one not in revoked])
        return revoked


class TrustedKeys:
    """The keys as of the last `refresh`; one thread at a time may call that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: tuple[str, ...] = ()
        self._stamp: tuple[int, ...] | None = None
        self._keys: tuple[TrustedKey, ...] = ()
        self._roles: dict[str, frozenset[Role]] = {}
        self.refresh()

    def __iter__(self) -> Iterator[TrustedKey]:
        return iter(self._keys)

    def roles_of(self, key: str) -> frozenset[Role]:
        return self._roles.get(key, frozenset())

    def name_of(self, key: str) -> str:
        return next((one.name for one in self._keys if one.key == key), "")

    def refresh(self) -> frozenset[str] | None:
        """Return the keys that lost a role, or None if the file has not changed.

        A file that stays unreadable counts as unchanged.
        """
        try:
            status = self.path.stat()
            stamp = status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size
            if stamp == self._stamp:
                return None
            lines = _lines(self.path)
        except (OSError, ConfigError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in _NO_DESCRIPTORS:
                return None  # this error concerns no key
            reason = error.message if isinstance(error, ConfigError) else error.strerror
            problem = f"cannot read {self.path}: {reason}; nobody is trusted"
            self._stamp = None
            return self._apply([], problem) if (problem,) != self.problems else None
        self._stamp = stamp
        return self._apply(lines)

    def _apply(self, lines: list[Line], *problems: str) -> frozenset[str]:
        keys, roles = list[TrustedKey](), defaultdict[str, frozenset[Role]](frozenset)
        for number, (_, one) in enumerate(lines, start=1):
            if isinstance(one, ConfigError):
                problems += (f"{self.path}:{number}: {one.message}",)
            elif one is not None:
                keys.append(one)
                roles[one.key] |= one.roles
        before, self._roles = self._roles, dict(roles)
        self._keys, self.problems = tuple(keys), problems
        return frozenset(key for key, had in before.items() if had - self.roles_of(key))


def _lines(path: Path) -> list[Line]:
    lines = list[Line]()
    for text in read(path, require_unwritable, MAX_BYTES).decode(errors="replace").splitlines():
        parsed: TrustedKey | ConfigError | None = None
        if text.strip() and not text.startswith("#"):
            try:
                parsed = TrustedKey.read(text)
            except ConfigError as error:
                parsed = error
        lines.append((text, parsed))
    return lines


# The lock is on the file itself, to leave no lock file behind. A waiting writer may hold the lock
# of a file that another writer has replaced meanwhile; then it retries.
@contextmanager
def _locked(path: Path, *, create: bool = False) -> Iterator[Path]:
    path = path.resolve()
    try:
        if create:
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        while True:
            with path.open("a" if create else "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    yield path
                    return
    except OSError as error:
        verb = "write" if create else "read the key file"
        raise ConfigError(f"cannot {verb} {path}: {error.strerror}") from error


def _replace(path: Path, lines: Iterable[str]) -> None:
    replace(path, "".join(f"{line}\n" for line in lines), 0o644)
