"""Files of keys: a secret one that nobody else may read, and public ones with their roles.

Refuses a secret file that others can read, files that others can write, and keys that are none.
"""

import json
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbus.bus import KeyPair, key_pair_of, require_key
from kvbus.errors import ConfigError
from kvbus.protocol.message import Role

MAX_FILE_BYTES = 4096
SUFFIX = ".toml"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key, the name that its file gives it, and what it is trusted as."""

    name: str
    key: str
    roles: frozenset[Role]


def read_secret(path: Path) -> KeyPair:
    """The key pair in a file that `write_secret` made; raises `ConfigError`, never with the key."""
    text, status = _read(path)
    _require_private(path, status)
    fields = _parse(path, text)
    if "secret_key" not in fields:
        raise ConfigError(f"{path} has no secret_key; make a key with: kvbus keys new FILE")
    try:
        pair = key_pair_of(str(fields["secret_key"]))
    except ConfigError as error:
        raise ConfigError(f"{path}: secret_key: {error.message}") from error
    if fields.get("public_key", pair.public) != pair.public:
        raise ConfigError(f"{path}: public_key is not that of secret_key")
    return pair


def read_private(path: Path) -> bytes:
    """What is in a file that nobody else may read; raises `ConfigError`."""
    content, status = _read_bytes(path)
    _require_private(path, status)
    return content


def write_secret(path: Path, pair: KeyPair) -> None:
    """A new file with mode 0600; raises `ConfigError`, also when there is one already."""
    text = (
        "# The secret key of a kvbus agent or tool: nobody else may read it. Others trust\n"
        "# public_key: kvbus keys trust FOLDER KEY --name NAME --role ROLE\n"
        f"public_key = {json.dumps(pair.public)}\nsecret_key = {json.dumps(pair.secret)}\n"
    )
    _create(path, text, 0o600)


def read_public(path: Path) -> str:
    """The public key in a file, secret or not; raises `ConfigError`."""
    text, _ = _read(path)
    fields = _parse(path, text)
    key = str(fields.get("public_key", ""))
    _require_key(path, key)
    return key


def read_trusted(path: Path) -> TrustedKey:
    """What a file in a folder of trusted keys says; raises `ConfigError`."""
    text, status = _read(path)
    require_unwritable(path, status)
    fields = _parse(path, text)
    unknown = sorted(fields.keys() - {"public_key", "roles"})
    if unknown:
        raise ConfigError(f"{path}: key '{unknown[0]}' is not known; public_key and roles are")
    key = str(fields.get("public_key", ""))
    _require_key(path, key)
    roles = fields.get("roles")
    if not isinstance(roles, list) or not roles:
        raise ConfigError(f"{path}: roles is not a list such as {_ROLES_EXAMPLE}")
    return TrustedKey(path.stem, key, frozenset(_role(path, name) for name in roles))


def write_trusted(folder: Path, trusted: TrustedKey) -> Path:
    """A new file in the folder; raises `ConfigError`, also when the name is taken."""
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    roles = json.dumps(sorted(trusted.roles))
    path = folder / f"{trusted.name}{SUFFIX}"
    _create(path, f"public_key = {json.dumps(trusted.key)}\nroles = {roles}\n", 0o644)
    return path


def require_unwritable(path: Path, status: os.stat_result) -> None:
    """Raise `ConfigError` when somebody else could change what lies at ``path``.

    Modes do not count where the file system is mounted read-only, as Kubernetes mounts a ConfigMap
    and a Secret: their folders have mode 0777.
    """
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} belongs to uid {status.st_uid}, neither to us nor to root")
    if status.st_mode & 0o022 and not os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(f"{path} can be changed by others: run 'chmod go-w {path}'")


def _require_private(path: Path, status: os.stat_result) -> None:
    """Raise `ConfigError` when somebody else can read or change what lies at ``path``.

    A file of root may be lent to our group, as a mounted Kubernetes secret is.
    """
    require_unwritable(path, status)
    lent = status.st_uid == 0 and os.geteuid() != 0
    if status.st_mode & (0o007 if lent else 0o077):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{path} has mode {mode:04o}: others can read the secret in it; run "
            f"'chmod 0600 {path}', and make a new one if somebody may have read it"
        )


_ROLES_EXAMPLE = '["decode"]'


def _require_key(path: Path, key: str) -> None:
    try:
        require_key(key)
    except ConfigError as error:
        raise ConfigError(f"{path}: public_key: {error.message}") from error


def _role(path: Path, name: object) -> Role:
    try:
        return Role(str(name))
    except ValueError as error:
        known = ", ".join(Role)
        raise ConfigError(f"{path}: there is no role {name!r}; there are {known}") from error


def _read(path: Path) -> tuple[str, os.stat_result]:
    content, status = _read_bytes(path)
    return content.decode(errors="replace"), status


def _read_bytes(path: Path) -> tuple[bytes, os.stat_result]:
    """The content and what was true of the file that was really read."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is no key file: it is larger than {MAX_FILE_BYTES} bytes")
    return content, status


def _parse(path: Path, text: str) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no key file: it is not TOML") from error


def _create(path: Path, text: str, mode: int) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already; it was left as it is") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def roles_of(names: Iterable[str]) -> frozenset[Role]:
    """The roles of these names; raises `ConfigError` for one that is not known."""
    return frozenset(_role(Path("--role"), name) for name in names)
