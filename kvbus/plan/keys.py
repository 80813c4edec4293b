"""The keys of a spec of an engine: what each may be, and how text becomes it.

Refuses a value out of its range with a `ConfigError` that names key, value and what is allowed.
"""

from collections.abc import Callable, Mapping

from kvbus.errors import ConfigError, GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, AxisName, KvLayout

Value = int | bool | str
Values = Mapping[str, Value]

MAX_LAYERS = 512
MAX_SPAN = 1 << 24
"""Tokens of a request, and so of a window."""

DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "f8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


Key = tuple[str, Callable[[object], Value | None]]
"""What one key may be, and what makes its value of a text, or of what a TOML file has."""


def refused(name: str, given: object, allowed: str) -> ConfigError:
    """The error of one key: its name, what was given, what is allowed."""
    text = str(given).lower() if isinstance(given, bool) else str(given)
    text = text if len(text) <= 60 else f"{text[:57]}..."
    return ConfigError(f"{name}={text!r}: {name} is {allowed}", field=name)


def _whole(low: int, high: int, *, step: int = 1) -> Key:
    def read(given: object) -> int | None:
        if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= 20:
            given = int(given)
        if isinstance(given, bool) or not isinstance(given, int):
            return None
        return given if low <= given <= high and given % step == 0 else None

    return f"{'a whole' if step == 1 else 'an even'} number from {low} to {high}", read


def _one_of(choices: Values, allowed: str) -> Key:
    def read(given: object) -> Value | None:
        return choices.get(str(given).lower()) if isinstance(given, str | bool) else None

    return allowed, read


def _read_layout(given: object) -> str | None:
    """The text as `KvLayout.parse` takes it."""
    text = str(given).upper()
    if text not in ("NHD", "HND"):
        text = str(given).lower().replace(".", ",")
    try:
        KvLayout.parse(text)
    except GeometryError:
        return None
    return text


def _read_name(given: object) -> str | None:
    is_name = isinstance(given, str) and 0 < len(given) <= 256 and given.isprintable()
    return str(given) if is_name else None


_AXES = ".".join(name for name in AxisName if name is not AxisName.LAYER)
_DTYPES = {name: name for name in DTYPE_SIZES_BYTES} | DTYPE_ALIASES
_BOOLS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

ENGINE_KEYS: Mapping[str, Key] = {
    "tp": _whole(1, 1024),
    "pp": _whole(1, 1024),
    "layout": (f"NHD, HND, or all axes joined by dots, as {_AXES}", _read_layout),
    "cross_layer": _one_of(_BOOLS, "true or false"),
    "model": ("a printable name of at most 256 characters", _read_name),
}
GROUP_KEYS: Mapping[str, Key] = {
    "block": _whole(1, 1 << 16),
    "kv_heads": _whole(1, 4096),
    "head": _whole(2, 1 << 16, step=2),
    "layers": _whole(1, MAX_LAYERS),
    "dtype": _one_of(_DTYPES, "one of " + ", ".join([*DTYPE_SIZES_BYTES, *DTYPE_ALIASES])),
    "attention": _one_of({"gqa": "gqa", "mla": "mla"}, "gqa or mla"),
    "window": _whole(1, MAX_SPAN),
}
ALL_KEYS: Mapping[str, Key] = {**ENGINE_KEYS, **GROUP_KEYS}
STATE_KEYS: Mapping[str, Key] = {
    "name": ENGINE_KEYS["model"],
    "units": _whole(1, 4096),
    "bytes": _whole(1, 1 << 30),
}


def read_value(name: str, given: object, keys: Mapping[str, Key] = ALL_KEYS) -> Value:
    """The value of ``name``; raises `ConfigError` for a key that there is not, or a bad value."""
    if name not in keys:
        raise ConfigError(f"{name!r} is not a key; keys are {', '.join(keys)}", field=name)
    allowed, read = keys[name]
    found = read(given)
    if found is None:
        raise refused(name, given, allowed)
    return found
