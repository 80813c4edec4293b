"""Sources of an agent's configuration.

defaults  <  CONFIG.toml  <  KVBUS_KEY=value  <  --set key=value
"""

import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec

from kvbus.errors import ConfigError, field_and_reason
from kvbus.variables import PREFIX, Variable

LIKE = 0.8


@dataclass(frozen=True)
class RawConfig:
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


def gather(
    kind: type[msgspec.Struct],
    path: Path | None,
    *,
    settings: Iterable[str] = (),
    knows_all: bool = True,
    called: str = "an agent",
) -> RawConfig:
    """Return the configured keys of ``kind``; raise `ConfigError` that names key and source."""
    kinds, given = kinds_of(kind), RawConfig()
    for key, value in _of_file(path):
        if key in kinds:
            given.values[key], given.origins[key] = value, str(path)
        elif knows_all:
            raise _no_such_key(f"{path}: {called} has no key '{key}'", key, kinds)
    for key, origin, text in (*_of_environment(kinds, knows_all), *_of_settings(kinds, settings)):
        given.values[key], given.origins[key] = _typed(text, kinds[key], key, origin), origin
    return given


def variable(key: str) -> str:
    return PREFIX + key.upper()


def kinds_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in kind.__struct_fields__}


def describe_error(error: msgspec.ValidationError, value: object, hint: Any) -> str:
    reason = field_and_reason(error)[1]
    if reason.startswith("cannot be"):
        return f"{value!r}: expected one of {', '.join(map(str, get_args(_bare(hint))))}"
    if reason.startswith("must match"):
        return f"{value!r}: expected {_expected_by(hint)}"
    return reason


def _of_file(path: Path | None) -> Iterable[tuple[str, Any]]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8")).items() if path else ()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def _of_environment(kinds: Mapping[str, Any], knows_all: bool) -> Iterator[tuple[str, str, str]]:
    for name in sorted(os.environ):
        if not name.startswith(PREFIX) or name in list(Variable):
            continue
        key = name.removeprefix(PREFIX).lower()
        if key in kinds:
            yield key, name, os.environ[name]
        elif knows_all:
            raise _no_such_key(f"{name} is the variable of no key", key, kinds, shown=variable)


def _of_settings(
    kinds: Mapping[str, Any], settings: Iterable[str]
) -> Iterator[tuple[str, str, str]]:
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: not key=value, such as --set log_level=debug")
        if key not in kinds:
            raise _no_such_key(f"--set {key}: there is no such key", key, kinds)
        yield key, f"--set {key}", text


def _no_such_key(
    problem: str, key: str, kinds: Mapping[str, Any], *, shown: Any = str
) -> ConfigError:
    found = get_close_matches(key, kinds, n=1, cutoff=LIKE)
    meant = f"did you mean {shown(found[0])}?" if found else "--print-config has them all"
    return ConfigError(f"{problem}; {meant}", key=key)


def _expected_by(hint: Any) -> str:
    inner = get_args(hint)
    own = (one.extra["expected"] for one in inner if isinstance(one, msgspec.Meta) and one.extra)
    return next(own, "") or next(filter(None, map(_expected_by, inner)), "")


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _typed(text: str, hint: Any, key: str, origin: str) -> Any:
    value: Any = text
    if get_origin(_bare(hint)) in (tuple, dict):
        value = [part.strip() for part in text.split(",") if part.strip()]
    if get_origin(_bare(hint)) is dict:
        value = _table(value, key, origin)
    try:
        return msgspec.to_builtins(msgspec.convert(value, hint, strict=False))
    except msgspec.ValidationError as error:
        reason = describe_error(error, value, hint)
        raise ConfigError(f"{origin}: key '{key}': {reason}", key=key) from error


def _table(parts: Iterable[str], key: str, origin: str) -> dict[str, dict[str, str]]:
    table: dict[str, dict[str, str]] = {}
    for part in parts:
        path, equals, value = part.partition("=")
        outer, dot, inner = path.partition(".")
        if not (equals and dot and outer and inner):
            raise ConfigError(
                f"{origin}: key '{key}': '{part}' is not NAME.KEY=VALUE, separated by commas",
                key=key,
            )
        table.setdefault(outer, {})[inner] = value
    return table
