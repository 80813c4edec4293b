"""The groups of an engine, from the keys of a spec.

Refuses keys that are missing or contradict each other; a single value is for `keys` to judge.
"""

from collections.abc import Iterator, Mapping, Sequence

from kvbus.errors import ConfigError
from kvbus.geometry import GroupSpec, KvPart, StatePart, state_group
from kvbus.plan.keys import (
    GROUP_KEYS,
    MAX_LAYERS,
    NAME_KEY,
    STATE_KEYS,
    Value,
    read_value,
    refused,
)

Values = Mapping[str, Value]
MAX_GROUPS = 64
DEFAULTS: Values = {"block": 16, "dtype": "bfloat16", "attention": "gqa"}
LAYERS_ALLOWED = f"a list of layer numbers below {MAX_LAYERS}, or how many come next"
STATE_FORM = "a list of {name, units, bytes}"


def plain_groups(values: Values) -> tuple[GroupSpec, ...]:
    """One group of all layers; with a window two, its own the odd layers.

    Raises `ConfigError` for what is missing or contradicts.
    """
    num_layers = int(_needed(values, "layers"))
    layers = tuple(range(num_layers))
    window = values.get("window")
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
    """The ``[[groups]]`` of a file; what one does not say it has from ``inherited``.

    Raises `ConfigError`, which names the group.
    """
    if not isinstance(tables, list) or not 0 < len(tables) <= MAX_GROUPS:
        raise ConfigError(f"groups is 1 to {MAX_GROUPS} tables [[groups]]", field="groups")
    groups: list[GroupSpec] = []
    for number, table in enumerate(tables, start=1):
        where = f"group {number}"
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: {table!r} is not a table", field="groups")
        try:
            next_layer = max((max(group.layers) + 1 for group in groups), default=0)
            groups.append(_listed_group(table, inherited, next_layer))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", field="groups") from error
    return tuple(groups)


def _listed_group(table: Mapping[str, object], inherited: Values, next_layer: int) -> GroupSpec:
    if "name" not in table:
        raise ConfigError("name is missing", field="name")
    name = str(NAME_KEY.value("name", table["name"]))
    layers = _layers(table.get("layers"), next_layer)
    if "parts" in table:
        more = set(table) - {"name", "layers", "parts"}
        if more:
            raise ConfigError(
                f"{min(more)} does not go with parts: a state has only name, layers and parts",
                field=min(more),
            )
        return state_group(name, layers, tuple(_parts(table["parts"])))
    own = {
        key: read_value(key, given, GROUP_KEYS)
        for key, given in table.items()
        if key not in ("name", "layers")
    }
    return _attention(name, layers, {**inherited, **own})


def _layers(given: object, next_layer: int) -> tuple[int, ...]:
    if isinstance(given, int) and not isinstance(given, bool):
        layers = tuple(range(next_layer, next_layer + int(read_value("layers", given))))
    elif isinstance(given, Sequence) and given and all(type(one) is int for one in given):
        layers = tuple(given)
    else:
        raise refused("layers", given, LAYERS_ALLOWED)
    if min(layers) < 0 or max(layers) >= MAX_LAYERS:
        raise refused("layers", given, LAYERS_ALLOWED)
    return layers


def _parts(given: object) -> Iterator[StatePart]:
    if not isinstance(given, list) or not 0 < len(given) <= MAX_GROUPS:
        raise refused("parts", given, STATE_FORM)
    for one in given:
        if not isinstance(one, Mapping) or set(one) != {"name", "units", "bytes"}:
            raise refused("parts", one, STATE_FORM)
        yield StatePart(
            name=str(NAME_KEY.value("name", one["name"])),
            num_units=int(read_value("units", one["units"], STATE_KEYS)),
            unit_bytes=int(read_value("bytes", one["bytes"], STATE_KEYS)),
        )


def _attention(name: str, layers: tuple[int, ...], values: Values) -> GroupSpec:
    values = {**DEFAULTS, **values}
    is_latent = values["attention"] == "mla"
    if is_latent and values.get("kv_heads", 1) != 1:
        raise ConfigError(
            f"kv_heads={values['kv_heads']}: with attention=mla there is one latent, so kv_heads"
            " is left out",
            field="kv_heads",
        )
    window = values.get("window")
    return GroupSpec(
        name=name,
        layers=layers,
        block_size=int(values["block"]),
        num_kv_heads=1 if is_latent else int(_needed(values, "kv_heads")),
        head_dim=int(_needed(values, "head")),
        dtype=str(values["dtype"]),
        parts=(KvPart.LATENT,) if is_latent else (KvPart.KEY, KvPart.VALUE),
        window=None if window is None else int(window),
    )


def _needed(values: Values, key: str) -> Value:
    if key not in values:
        raise ConfigError(f"{key} is missing: it is {GROUP_KEYS[key].allowed}", field=key)
    return values[key]
