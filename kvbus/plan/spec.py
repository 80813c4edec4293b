"""What a plan is asked with: a short text or a TOML file of an engine.

Refuses, with a `ConfigError` of one line, what is no spec, contradicts itself or is too large. The
help of ``kvbus plan`` says what the keys mean.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from kvbus.errors import ConfigError, GeometryError
from kvbus.geometry import EngineSpec, KvLayout, validate_engine
from kvbus.plan.groups import listed_groups, plain_groups
from kvbus.plan.keys import ALL_KEYS, ENGINE_KEYS, Values, read_value

MAX_RANKS = 2048
MAX_FILE_BYTES = 1 << 20
NO_SPEC = "is neither key=value pairs nor a readable file"
_KEYS = ", ".join(ALL_KEYS)


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine, and the layout of its blocks."""

    engine: EngineSpec
    layout: KvLayout


def read_engine(option: str, text: str) -> PlannedEngine:
    """The engine that ``text``, a spec or the path of a file of one, describes.

    Raises `ConfigError` that begins with ``option``.
    """
    try:
        if not text:
            raise ConfigError(f"a spec is key=value pairs, or a file of them; keys are {_KEYS}")
        is_file = text.endswith(".toml") or "=" not in text
        given = _read_toml(Path(text), NO_SPEC) if is_file else _text_keys(text)
        return _engine(option.lstrip("-"), given)
    except (ConfigError, GeometryError) as error:
        raise ConfigError(f"{option}: {error.message}", option=option) from error


def _read_toml(path: Path, complaint: str) -> dict[str, object]:
    """What a TOML file has; raises `ConfigError`, with ``complaint`` where there is no file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ConfigError(f"{str(path)[:200]!r} {complaint}: {problem}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {str(error).splitlines()[0]}") from error


def _text_keys(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for pair in text.split(","):
        key, equals, value = (piece.strip() for piece in pair.partition("="))
        if not (equals and key and value):
            raise ConfigError(f"{pair.strip()[:60]!r} is not key=value; keys are {_KEYS}")
        if key in found:
            raise ConfigError(f"{key} is given twice", field=key)
        found[key] = value
    return found


def _engine(engine_id: str, given: dict[str, object]) -> PlannedEngine:
    tables = given.pop("groups", None)
    if tables is not None:
        for key in {"layers", "window"} & given.keys():
            raise ConfigError(f"{key} belongs into each of the groups", field=key)
    values = {key: read_value(key, value) for key, value in given.items()}
    inherited = {key: value for key, value in values.items() if key not in ENGINE_KEYS}
    engine = EngineSpec(
        engine_id=engine_id,
        model=str(values.get("model", "unnamed")),
        tp_size=int(values.get("tp", 1)),
        groups=plain_groups(values) if tables is None else listed_groups(tables, inherited),
        pp_size=int(values.get("pp", 1)),
    )
    validate_engine(engine)
    _check_ranks(engine)
    return PlannedEngine(engine, _layout(values))


def _layout(values: Values) -> KvLayout:
    text = str(values.get("layout", "NHD"))
    layout = KvLayout.parse(text)
    if layout.cross_layer and not values.get("cross_layer", True):
        raise ConfigError(
            f"cross_layer=false: layout={text} has the layer axis", field="cross_layer"
        )
    return KvLayout.parse(text, cross_layer=True) if values.get("cross_layer") else layout


def _check_ranks(engine: EngineSpec) -> None:
    num_layers = sum(len(group.layers) for group in engine.groups)
    if engine.pp_size > num_layers:
        raise ConfigError(
            f"pp={engine.pp_size}: more stages than the {num_layers} layers", field="pp"
        )
    if engine.num_ranks > MAX_RANKS:
        raise ConfigError(
            f"tp={engine.tp_size} times pp={engine.pp_size} is more than {MAX_RANKS} ranks",
            field="tp",
        )
