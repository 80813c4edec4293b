"""One side of a plan: an engine and its layout, from a short text or from a TOML file.

Refuses, with a `ConfigError` of one line, what is no spec, contradicts itself or is too large.

A short text has ``key=value`` pairs with commas between them::

    tp=4,layout=HND,block=16,kv_heads=8,head=128,layers=32,dtype=bf16

=========== ======================================================== =========
key         what it is                                               otherwise
=========== ======================================================== =========
tp          tensor parallel ranks; more than ``kv_heads``: replicas  1
pp          pipeline stages                                          1
layout      NHD, HND, or all axes: block.kv.token.head.dim           NHD
cross_layer whether one region has all layers                        false
block       tokens in a block                                        16
kv_heads    KV heads of the model                                    needed
head        elements of a head; with mla of the latent               needed
layers      layers                                                   needed
dtype       bf16, f16, f32, fp8, or the whole name                   bf16
attention   gqa, or mla (one latent for each token, on every rank)   gqa
window      tokens of a sliding window, in every other layer         none
model       name of the model; both sides' must be equal             unnamed
=========== ======================================================== =========

A TOML file has the same keys at its top, or ``[[groups]]`` with keys of their own; what a group
does not say, the top says::

    tp = 2
    layout = "HND"
    head = 128
    [[groups]]
    name = "full"
    layers = [0, 2, 4, 6]      # numbers, or how many come next
    kv_heads = 8
    [[groups]]
    name = "ssm"               # a state: opaque bytes, one for a request
    layers = [1, 3, 5, 7]
    parts = [{name = "conv", units = 8, bytes = 4096}, {name = "temporal", units = 1, bytes = 64}]
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbus.errors import ConfigError, GeometryError
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, validate_engine
from kvbus.plan.groups import Values, listed_groups, plain_groups
from kvbus.plan.keys import ALL_KEYS, ENGINE_KEYS, read_value

MAX_RANKS = 2048
MAX_FILE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Side:
    """An engine, the layout of its blocks, and the text that they were read from."""

    text: str
    engine: EngineSpec
    layout: KvLayout


def read_side(option: str, text: str) -> Side:
    """The side that ``text``, a spec or the path of a file of one, describes.

    Raises `ConfigError` that begins with ``option``.
    """
    try:
        if not text:
            raise ConfigError(f"a spec is key=value pairs, or a file of them; keys are {_keys()}")
        given = _file_keys(Path(text)) if _is_file(text) else _text_keys(text)
        return _side(option, text, given)
    except (ConfigError, GeometryError) as error:
        raise ConfigError(f"{option}: {error.message}", option=option) from error


def _side(option: str, text: str, given: dict[str, object]) -> Side:
    tables = given.pop("groups", None)
    if tables is not None:
        for key in {"layers", "window"} & given.keys():
            raise ConfigError(f"{key} belongs into each of the groups", field=key)
    values = {key: read_value(key, value) for key, value in given.items()}
    groups = plain_groups(values) if tables is None else listed_groups(tables, _inherited(values))
    engine = EngineSpec(
        engine_id=option.lstrip("-"),
        model=str(values.get("model", "unnamed")),
        tp_size=int(values.get("tp", 1)),
        groups=groups,
        pp_size=int(values.get("pp", 1)),
    )
    validate_engine(engine)
    _refuse_ranks(engine, groups)
    return Side(text, engine, _layout(values))


def _layout(values: Values) -> KvLayout:
    layout = KvLayout.parse(str(values.get("layout", "NHD")))
    if layout.cross_layer and not values.get("cross_layer", True):
        raise ConfigError(
            f"cross_layer=false: layout={values['layout']} has the layer axis", field="cross_layer"
        )
    if not values.get("cross_layer", False):
        return layout
    return KvLayout.parse(str(values.get("layout", "NHD")), cross_layer=True)


def _inherited(values: Values) -> Values:
    return {key: value for key, value in values.items() if key not in ENGINE_KEYS}


def _refuse_ranks(engine: EngineSpec, groups: tuple[GroupSpec, ...]) -> None:
    num_layers = sum(len(group.layers) for group in groups)
    if engine.pp_size > num_layers:
        raise ConfigError(
            f"pp={engine.pp_size}: more stages than the {num_layers} layers", field="pp"
        )
    if engine.num_ranks > MAX_RANKS:
        raise ConfigError(
            f"tp={engine.tp_size} times pp={engine.pp_size} is more than {MAX_RANKS} ranks",
            field="tp",
        )


def _is_file(text: str) -> bool:
    return text.endswith(".toml") or "=" not in text


def _text_keys(text: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for pair in text.split(","):
        key, equals, value = (piece.strip() for piece in pair.partition("="))
        if not (equals and key and value):
            raise ConfigError(f"{pair.strip()[:60]!r} is not key=value; keys are {_keys()}")
        if key in found:
            raise ConfigError(f"{key} is given twice", field=key)
        found[key] = value
    return found


def _file_keys(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{str(path)[:200]!r} is neither key=value pairs nor a readable file: {reason}"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    try:
        given: Mapping[str, object] = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{path} is not TOML: {reason}") from error
    return dict(given)


def _keys() -> str:
    return ", ".join(ALL_KEYS)
