"""The groups of an engine, from the keys of a spec.

Refuses keys that are missing or contradict each other; a single value is for `keys` to judge.
"""

from collections.abc import Mapping

from kvbus.errors import ConfigError
from kvbus.geometry import GroupSpec, KvPart, StatePart, state_group
from kvbus.plan.keys import GROUP_KEYS, MAX_LAYERS, STATE_KEYS, Values, read_value, refused

MAX_GROUPS = 64
DEFAULTS: Values = {"block": 16, "dtype": "bfloat16", "attention": "gqa"}
_LAYERS_ALLOWED = f"a list of layer numbers below {MAX_LAYERS}, or how many come next"
_STATE_FORM = "a list of {name, units, bytes}"


def plain_groups(values: Values) -> tuple[GroupSpec, ...]:
    """One group of all layers; with a window two, its own the odd layers."""
    num_layers, window = _needed(values, "layers"), values.get("window")
    layers = tuple(range(num_layers))
    if window is None:
        return (_attention("attention", layers, values),)
    if num_layers < 2:
        raise ConfigError(
            f"window={window}: every other layer has the window, so layers is 2 or more,"
            f" not {num_layers}",
            field="window",
        )
    full = {key: value for key, value in values.items() if key != "window"}
    return _attention("full", layers[::2], full), _attention("window", layers[1::2], values)


def listed_groups(tables: object, inherited: Values) -> tuple[GroupSpec, ...]:
    """The ``[[groups]]`` of a file; what one does not say it has from ``inherited``."""
    if not isinstance(tables, list) or not 0 < len(tables) <= MAX_GROUPS:
        raise ConfigError(f"groups is 1 to {MAX_GROUPS} tables [[groups]]", field="groups")
    groups: list[GroupSpec] = []
    for number, table in enumerate(tables, start=1):
        next_layer = max((max(group.layers) + 1 for group in groups), default=0)
        try:
            groups.append(_listed_group(table, inherited, next_layer))
        except ConfigError as error:
            raise ConfigError(f"group {number}: {error.message}", field="groups") from error
    return tuple(groups)


def _listed_group(table: object, inherited: Values, next_layer: int) -> GroupSpec:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{table!r} is not a table", field="groups")
    if "name" not in table:
        raise ConfigError("name is missing", field="name")
    name = str(read_value("name", table["name"], STATE_KEYS))
    layers = _layers(table.get("layers"), next_layer)
    others = {key: given for key, given in table.items() if key not in ("name", "layers")}
    if "parts" in others:
        return _state(name, layers, others)
    own = {key: read_value(key, given, GROUP_KEYS) for key, given in others.items()}
    return _attention(name, layers, {**inherited, **own})


def _layers(given: object, next_layer: int) -> tuple[int, ...]:
    layers: tuple[int, ...] = ()
    if type(given) is int:
        layers = tuple(range(next_layer, next_layer + int(read_value("layers", given))))
    elif isinstance(given, list) and all(type(one) is int for one in given):
        layers = tuple(given)
    if not layers or min(layers) < 0 or max(layers) >= MAX_LAYERS:
        raise refused("layers", given, _LAYERS_ALLOWED)
    return layers


def _state(name: str, layers: tuple[int, ...], table: Mapping[str, object]) -> GroupSpec:
    if more := table.keys() - {"parts"}:
        raise ConfigError(
            f"{min(more)} does not go with parts: a state has only name, layers and parts",
            field=min(more),
        )
    parts = table["parts"]
    if not isinstance(parts, list) or not 0 < len(parts) <= MAX_GROUPS:
        raise refused("parts", parts, _STATE_FORM)
    return state_group(name, layers, tuple(_part(one) for one in parts))


def _part(given: object) -> StatePart:
    if not isinstance(given, Mapping) or given.keys() != STATE_KEYS.keys():
        raise refused("parts", given, _STATE_FORM)
    values = {key: read_value(key, given[key], STATE_KEYS) for key in STATE_KEYS}
    return StatePart(str(values["name"]), int(values["units"]), int(values["bytes"]))


def _attention(name: str, layers: tuple[int, ...], values: Values) -> GroupSpec:
    values = {**DEFAULTS, **values}
    is_latent = values["attention"] == "mla"
    if is_latent and values.get("kv_heads", 1) != 1:
        raise ConfigError(
            f"kv_heads={values['kv_heads']}: with attention=mla there is one latent, so kv_heads"
            " is left out",
            field="kv_heads",
        )
    return GroupSpec(
        name=name,
        layers=layers,
        block_size=int(values["block"]),
        num_kv_heads=1 if is_latent else _needed(values, "kv_heads"),
        head_dim=_needed(values, "head"),
        dtype=str(values["dtype"]),
        parts=(KvPart.LATENT,) if is_latent else (KvPart.KEY, KvPart.VALUE),
        window=int(values["window"]) if "window" in values else None,
    )


def _needed(values: Values, key: str) -> int:
    if key not in values:
        raise ConfigError(f"{key} is missing: it is {GROUP_KEYS[key][0]}", field=key)
    return int(values[key])
