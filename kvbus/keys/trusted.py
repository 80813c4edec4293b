"""The file of trusted public keys, as it is now: a line for each, with name, roles and key.

    decode-0  decode,observer  -@rT4y{r9p&oQyQGlh2I-Ry18AU:N5cLRM=y[*ls

A line that is none trusts nobody, and no more; a file that cannot be read trusts nobody at all.
"""

import errno
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbus.bus import require_key
from kvbus.errors import ConfigError
from kvbus.keys.files import create, read, require_unwritable
from kvbus.protocol.message import Role

MAX_BYTES = 1 << 20
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key, what it is called, and what it is trusted as."""

    name: str
    key: str
    roles: frozenset[Role]

    def __str__(self) -> str:
        """Its line."""
        return f"{self.name}  {','.join(sorted(self.roles))}  {self.key}"

    @classmethod
    def read(cls, line: str) -> "TrustedKey":
        """What a line says; raises `ConfigError`."""
        try:
            name, roles, key = line.split()
        except ValueError as error:
            raise ConfigError("not NAME ROLE[,ROLE...] KEY") from error
        require_key(key)
        return cls(name, key, roles_of(roles.split(",")))


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """The roles of these names; raises `ConfigError`."""
    for name in names:
        if name not in list(Role):
            raise ConfigError(f"there is no role {name!r}; there are {', '.join(Role)}")
    return frozenset(map(Role, names))


def write_trusted(path: Path, trusted: TrustedKey) -> None:
    """Add a line, to a new file if there is none; raises `ConfigError`, also for a taken name."""
    text = _text(path) if path.exists() else ""
    if any(isinstance(one, TrustedKey) and one.name == trusted.name for _, one in _lines(text)):
        raise ConfigError(f"{path} has a key of the name {trusted.name!r} already")
    ended = "" if not text or text.endswith("\n") else "\n"
    _replace(path, f"{text}{ended}{trusted}\n")


def revoke_trusted(path: Path, key: str) -> list[TrustedKey]:
    """Leave out the lines with this name or key, and return them; raises `ConfigError`."""
    kept, revoked = "", list[TrustedKey]()
    for line, one in _lines(_text(path)):
        if isinstance(one, TrustedKey) and key in (one.name, one.key):
            revoked.append(one)
        else:
            kept += line
    if revoked:
        _replace(path, kept)
    return revoked


class TrustedKeys:
    """Who is trusted, as what; `refresh` looks whether the file has changed.

    ``problems`` are the lines that are left out, each with why. To refresh is for one thread at a
    time, which need not be that of those who ask.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: tuple[str, ...] = ()
        self._stamp: tuple[int, ...] | None = None
        self._keys: tuple[TrustedKey, ...] = ()
        self._roles: dict[str, frozenset[Role]] = {}

    def __iter__(self) -> Iterator[TrustedKey]:
        return iter(self._keys)

    def roles_of(self, key: str) -> frozenset[Role]:
        """What the key is trusted as; nothing for one that is not trusted."""
        return self._roles.get(key, frozenset())

    def name_of(self, key: str) -> str:
        """The name of the key, for logs; empty for one that is not trusted."""
        return next((one.name for one in self._keys if one.key == key), "")

    def refresh(self) -> bool:
        """Read the file if it has changed; returns whether it had."""
        try:
            status = self.path.stat()
            stamp = status.st_dev, status.st_ino, status.st_ctime_ns, status.st_size
            if stamp == self._stamp:
                return False
            text = _text(self.path)
        except (OSError, ConfigError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            if isinstance(cause, OSError) and cause.errno in _NO_DESCRIPTORS:
                return False  # that says nothing of the keys
            reason = error.message if isinstance(error, ConfigError) else error.strerror
            before, self._stamp = self.problems, None
            self._take("", f"cannot read {self.path}: {reason}; nobody is trusted")
            return self.problems != before
        self._stamp = stamp
        self._take(text)
        return True

    def lost(self) -> frozenset[str] | None:
        """Refresh; returns the keys that lost a role by it, or None when nothing has changed."""
        before = self._roles
        if not self.refresh():
            return None
        return frozenset(key for key, had in before.items() if had - self.roles_of(key))

    def _take(self, text: str, *problems: str) -> None:
        keys, roles = list[TrustedKey](), defaultdict[str, frozenset[Role]](frozenset)
        for number, (_, one) in enumerate(_lines(text), start=1):
            if isinstance(one, ConfigError):
                problems += (f"{self.path}:{number}: {one.message}",)
            elif one is not None:
                keys.append(one)
                roles[one.key] |= one.roles
        self._keys, self._roles, self.problems = tuple(keys), dict(roles), problems


def _text(path: Path) -> str:
    return read(path, require_unwritable, MAX_BYTES).decode(errors="replace")


def _lines(text: str) -> Iterator[tuple[str, TrustedKey | ConfigError | None]]:
    """Each line, and what it says; nothing for an empty line or a comment."""
    for line in text.splitlines(keepends=True):
        said: TrustedKey | ConfigError | None = None
        if line.strip() and not line.startswith("#"):
            try:
                said = TrustedKey.read(line)
            except ConfigError as error:
                said = error
        yield line, said


def _replace(path: Path, text: str) -> None:
    """Agents see the file as it was, or as it is now."""
    path = path.resolve()
    new = path.with_name(f"{path.name}.new")
    try:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        create(new, text, 0o644)
        new.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
