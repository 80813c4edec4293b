"""Files of keys; no error message contains a secret."""

import json
import os
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import Any

from kvbus.bus import KeyPair, key_pair_of, require_key
from kvbus.errors import ConfigError

MAX_FILE_BYTES = 4096


def read_secret(path: Path) -> KeyPair:
    fields = _fields(path, _require_private)
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
    return read(path, _require_private)


def read_public(path: Path) -> str:
    key = str(_fields(path, lambda *_: None).get("public_key", ""))
    try:
        require_key(key)
    except ConfigError as error:
        raise ConfigError(f"{path}: public_key: {error.message}") from error
    return key


def write_secret(path: Path, pair: KeyPair) -> None:
    text = (
        "# The secret key of a kvbus agent or tool: nobody else may read it. Others trust\n"
        "# public_key: kvbus keys trust FILE KEY --name NAME --role ROLE\n"
        f"public_key = {json.dumps(pair.public)}\nsecret_key = {json.dumps(pair.secret)}\n"
    )
    create(path, text, 0o600)


def key_options(key_file: str, server_key: str) -> str:
    if not (key_file and server_key):
        return ""
    return f" --key-file {quote(key_file)} --server-key={quote(server_key)}"


def require_unwritable(path: Path, status: os.stat_result) -> None:
    """Raise `ConfigError` if another user could change the file.

    On a read-only file system, the folders of a mounted ConfigMap or Secret may have mode 0777.
    """
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path} belongs to uid {status.st_uid}, neither to us nor to root")
    if status.st_mode & 0o022 and not os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(f"{path} can be changed by others: run 'chmod go-w {path}'")


def _require_private(path: Path, status: os.stat_result) -> None:
    """Let our group read a file of root, such as a Kubernetes secret."""
    require_unwritable(path, status)
    lent = status.st_uid == 0 and os.geteuid() != 0
    if status.st_mode & (0o007 if lent else 0o077):
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{path} has mode {mode:04o}: others can read the secret in it; run "
            f"'chmod 0600 {path}', and make a new one if somebody may have read it"
        )


Check = Callable[[Path, os.stat_result], None]


def _fields(path: Path, check: Check) -> Mapping[str, Any]:
    try:
        return tomllib.loads(read(path, check).decode(errors="replace"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no key file: it is not TOML") from error


def create(path: Path, text: str, mode: int) -> None:
    try:
        _put(path, text, mode, os.link)
    except FileExistsError as error:
        raise ConfigError(f"{path} is there already; it was left as it is") from error
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def replace(path: Path, text: str, mode: int) -> None:
    _put(path, text, mode, os.replace)


# The process may be killed, or the machine may stop, between any two lines. Until the last step
# `path` is unchanged. The leftover file has a name that no later call uses.
def _put(path: Path, text: str, mode: int, move: Callable[[str, Path], None]) -> None:
    descriptor, new = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        move(new, path)
    finally:
        with suppress(FileNotFoundError):  # it was moved
            os.unlink(new)  # noqa: PTH108 - `mkstemp` returns a str
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path, check: Check, most_bytes: int = MAX_FILE_BYTES) -> bytes:
    try:
        with path.open("rb") as file:
            check(path, os.fstat(file.fileno()))
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {path}: {error.strerror}") from error
    if len(content) > most_bytes:
        raise ConfigError(f"{path} is no key file: it is larger than {most_bytes} bytes")
    return content
