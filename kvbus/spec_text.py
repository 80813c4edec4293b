"""Engines as text such as ``tp=2 layout=HND block=16``, separated by spaces or commas."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from kvbus.errors import ConfigError, KVBusError, reason_of
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, KvPart, validate_engine

MAX_RANKS = 2048
MAX_FILE_BYTES = 1 << 20
MAX_SPAN = 1 << 24
DTYPE_ALIASES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "f32": "float32",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
}


class LayoutFields(msgspec.Struct, forbid_unknown_fields=True):
    layout: Annotated[str, Meta(max_length=64)] = "NHD"
    cross_layer: bool = False

    def parse(self) -> KvLayout:
        text = self.layout.upper()
        if text not in ("NHD", "HND"):
            text = self.layout.lower().replace(".", ",")
        return KvLayout.parse(text, cross_layer=self.cross_layer)


class EngineFields(LayoutFields, kw_only=True):
    tp: Annotated[int, Meta(ge=1, le=1024)] = 1
    pp: Annotated[int, Meta(ge=1, le=1024)] = 1
    block: Annotated[int, Meta(ge=1, le=1 << 16)] = 16


class ModelFields(EngineFields, kw_only=True):
    layers: Annotated[int, Meta(ge=1, le=512)]
    head: Annotated[int, Meta(ge=1, le=1 << 16)]
    kv_heads: Annotated[int, Meta(ge=1, le=4096)] = 0
    dtype: str = "bfloat16"
    attention: Literal["gqa", "mla"] = "gqa"
    window: Annotated[int, Meta(ge=1, le=MAX_SPAN)] | None = None
    model: Annotated[str, Meta(min_length=1, max_length=256)] = "unnamed"

    def engine(self, engine_id: str) -> EngineSpec:
        """With a window, a second group has the odd layers."""
        is_latent = self.attention == "mla"
        if is_latent == bool(self.kv_heads):
            raise ConfigError("kv_heads is left out with attention=mla, and needed without")
        group = partial(
            GroupSpec,
            block_size=self.block,
            num_kv_heads=self.kv_heads or 1,
            head_dim=self.head,
            dtype=DTYPE_ALIASES.get(self.dtype, self.dtype),
            parts=(KvPart.LATENT,) if is_latent else (KvPart.KEY, KvPart.VALUE),
        )
        layers = tuple(range(self.layers))
        groups: tuple[GroupSpec, ...] = (group("attention", layers),)
        if self.window is not None:
            if self.layers < 2:
                raise ConfigError("window: every other layer has it, so layers is 2 or more")
            window = group("window", layers[1::2], window=self.window)
            groups = (group("full", layers[::2]), window)
        return EngineSpec(engine_id, self.model, self.tp, groups, self.pp)


def gpu_number(device: str) -> int | None:
    """Return the ordinal of ``cuda`` or ``cuda:N``, and None for ``cpu``; raise `ConfigError`."""
    if device == "cpu":
        return None
    found = re.fullmatch(r"cuda(?::(\d{1,3}))?", device)
    if not found:
        raise ConfigError(f"device {device!r} is neither cpu nor cuda nor cuda:N")
    return int(found[1] or 0)


W = TypeVar("W", bound=LayoutFields)
_WRONG = KVBusError, msgspec.MsgspecError, OSError, UnicodeDecodeError


def read_fields(option: str, text: str, kind: type[W]) -> W:
    try:
        fields = _parse_fields(text, kind)
        fields.parse()
    except _WRONG as error:
        raise _refusal(option, error) from error
    return fields


def read_engine(option: str, text: str) -> tuple[EngineSpec, KvLayout]:
    """Parse `ModelFields`, or a TOML or JSON file with `LayoutFields` after its path."""
    try:
        first, _, more = text.partition(",")
        if "=" in first or not first:
            fields = _parse_fields(text, ModelFields)
            engine, layout = fields.engine(option.lstrip("-")), fields.parse()
        else:
            engine = _read_file(Path(first))
            layout = _parse_fields(more, LayoutFields).parse()
        validate_engine(engine)
        if engine.num_ranks > MAX_RANKS:
            raise ConfigError(f"tp times pp is more than {MAX_RANKS} ranks")
        if engine.pp_size > (num_layers := sum(len(one.layers) for one in engine.groups)):
            raise ConfigError(f"pp={engine.pp_size} is more than the {num_layers} layers")
    except _WRONG as error:
        raise _refusal(option, error) from error
    return engine, layout


def _refusal(option: str, error: Exception) -> ConfigError:
    message = reason_of(error).replace("\n", " ")
    help_at = "; --help describes a SPEC" if isinstance(error, msgspec.MsgspecError) else ""
    return ConfigError(f"{option}: {message}{help_at}", option=option)


def _parse_fields(text: str, kind: type[W]) -> W:
    values: dict[str, str] = {}
    for item in re.split(r"[\s,]+", text.strip()) if text.strip() else ():
        key, equals, value = item.partition("=")
        if not (equals and key and value) or key in values:
            raise ConfigError(f"{item[:60]!r} is not a key=value that is given once")
        values[key] = value
    return msgspec.convert(values, kind, strict=False)


def _read_file(path: Path) -> EngineSpec:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} has more than {MAX_FILE_BYTES} bytes")
    decode = msgspec.json.decode if path.suffix == ".json" else msgspec.toml.decode
    return decode(content, type=EngineSpec)
