"""Where the configuration of an agent comes from: a file, the environment, and ``--set``.

Refuses a variable or setting that is no key, with the nearest one, and a value of another kind.

    defaults  <  CONFIG.toml  <  KVBUS_SECTION__KEY=value  <  --set section.key=value
"""

import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from kvbus.errors import ConfigError

PREFIX, NESTED = "KVBUS_", "__"
OTHERS = frozenset({"ATTACH", "ROLE", "SERVER_KEY"})
"""Variables of engines and of commands, without the prefix."""
SERVICE_LINK = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_|$)|_PORT$|_PORT_\d+_(TCP|UDP|SCTP)(_|$)")
"""What Kubernetes tells every pod of a Service whose name begins with `kvbus-`."""
LIKE = 0.8
"""How like a key a wrong one has to be to be taken for it, from 0 to 1."""
REFERENCE = re.compile(r"\$?\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


@dataclass(frozen=True)
class Given:
    """Values by their keys, dotted in a section, and where each of them stands."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)

    def nested(self) -> dict[str, Any]:
        """The values as a file has them, sections within."""
        fields: dict[str, Any] = {}
        for key, value in self.values.items():
            section, _, name = key.rpartition(".")
            inside = fields.setdefault(section, {}) if section else fields
            if isinstance(inside, dict):  # else it is no section, which is refused
                inside[name] = value
        return fields


def gather(
    kind: type[msgspec.Struct],
    path: Path | None,
    *,
    settings: Iterable[str] = (),
    environment: Mapping[str, str] = os.environ,
    knows_all: bool = True,
    called: str = "an agent",
) -> Given:
    """The keys of ``kind`` that are given, which is ``called`` so; the later source wins.

    ``knows_all`` is false for the keys that all agents have: the others are not looked at. Raises
    `ConfigError` that names key and source.
    """
    kinds = dict(kinds_of(kind))
    given, ours = Given(), set(kind.__struct_fields__)
    if path is not None:
        for key, value in _flat(read_toml(path)):
            if knows_all or key.partition(".")[0] in ours:
                if key not in kinds and key not in ours:
                    raise _no_such_key(f"{path}: {called} has no key '{key}'", key, kinds)
                _give(given, key, _expanded(value, key, str(path), environment), str(path))
    texts = _of_environment(kinds, environment, knows_all=knows_all)
    for key, origin, text in (*texts, *_of_settings(kinds, settings)):
        _give(given, key, _typed(text, kinds[key], key, origin, environment), origin)
    return given


def read_toml(path: Path) -> dict[str, Any]:
    """What the file says; raises `ConfigError` that names it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def variable(key: str) -> str:
    """The variable of a key."""
    return PREFIX + key.replace(".", NESTED).upper()


def _give(given: Given, key: str, value: Any, origin: str) -> None:
    given.values[key] = value
    given.origins[key] = origin


def kinds_of(kind: type[msgspec.Struct], section: str = "") -> Iterator[tuple[str, Any]]:
    """Each key with its type and bounds."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if name not in kind.__struct_fields__:
            continue
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from kinds_of(hint, f"{section}{name}.")
        else:
            yield f"{section}{name}", hint


def _flat(fields: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, dict) and value and not section:
            yield from _flat(value, f"{name}.")
        else:
            yield f"{section}{name}", value


def _of_environment(
    kinds: Mapping[str, Any], environment: Mapping[str, str], *, knows_all: bool
) -> Iterator[tuple[str, str, str]]:
    for name in sorted(environment):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in OTHERS or SERVICE_LINK.search(rest):
            continue
        key = rest.lower().replace(NESTED, ".")
        if key in kinds:
            yield key, name, environment[name]
        elif knows_all:
            raise ConfigError(f"{name} is the variable of no key{_nearest(key, kinds, variable)}")


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


def _no_such_key(problem: str, key: str, kinds: Mapping[str, Any]) -> ConfigError:
    return ConfigError(f"{problem}{_nearest(key, kinds, str)}", key=key)


def _nearest(key: str, kinds: Mapping[str, Any], shown: Any) -> str:
    """The key that was meant, as far as one can tell."""
    in_section = [one for one in kinds if one.rpartition(".")[2] == key]
    found = in_section or get_close_matches(key, kinds, n=1, cutoff=LIKE)
    return f"; did you mean {shown(found[0])}?" if found else "; --print-config has them all"


def in_words(error: msgspec.ValidationError, value: object, hint: Any) -> str:
    """What is wrong with the value of a key, in words for people where msgspec has none."""
    reason = str(error).partition(" - at `")[0]
    if reason.startswith("Invalid enum value"):
        choices = ", ".join(map(str, get_args(get_args(hint)[0])))
        return f"{value!r}: expected one of {choices}"
    if "matching regex" in reason:
        return f"{value!r}: expected {_words_of(hint)}"
    return reason


def _words_of(hint: Any) -> str:
    """What a pattern means: ``extra`` of its `Meta` says it."""
    inner = get_args(hint)
    own = (one.extra["words"] for one in inner if isinstance(one, msgspec.Meta) and one.extra)
    return next(own, "") or next(filter(None, map(_words_of, inner)), "")


def _typed(text: str, hint: Any, key: str, origin: str, environment: Mapping[str, str]) -> Any:
    """The value that a text stands for; a list is separated by commas."""
    text = _referenced(text, key, origin, environment)
    value: Any = text
    if get_origin(get_args(hint)[0]) is tuple:
        value = [part.strip() for part in text.split(",") if part.strip()]
    try:
        return msgspec.to_builtins(msgspec.convert(value, hint, strict=False))
    except msgspec.ValidationError as error:
        reason = in_words(error, value, hint)
        raise ConfigError(f"{origin}: key '{key}': {reason}", key=key) from error


def _expanded(value: Any, key: str, origin: str, environment: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return _referenced(value, key, origin, environment)
    if isinstance(value, list):
        return [_expanded(one, key, origin, environment) for one in value]
    return value


def _referenced(text: str, key: str, origin: str, environment: Mapping[str, str]) -> str:
    """The text, with `$(NAME)` replaced by that variable; `$$(NAME)` stands for `$(NAME)`."""

    def found(match: re.Match[str]) -> str:
        whole, name = match[0], match[1]
        if whole.startswith("$$"):
            return whole[1:]
        if name not in environment:
            raise ConfigError(
                f"{origin}: key '{key}': the variable {name} of $({name}) is not set; "
                f"set it, or write $$({name}) for the text itself",
                key=key,
            )
        return environment[name]

    return REFERENCE.sub(found, text)
