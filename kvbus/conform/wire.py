"""Reads what an engine sends as strictly as the page says, and writes what an agent answers.

Refuses a map with a key that is there twice or is no string, and extension types: `BadMapError`.
"""

from collections.abc import Mapping
from typing import Any

import msgpack


class BadMapError(Exception):
    """Bytes that are not one msgpack map as the page wants it."""


def read_map(packed: bytes) -> dict[str, Any]:
    """The map in these bytes; raises `BadMapError` that says what is wrong."""
    try:
        fields = msgpack.unpackb(packed, object_pairs_hook=_pairs, ext_hook=_no_extension)
    except BadMapError:
        raise
    except Exception as error:  # msgpack documents no closed set
        raise BadMapError(f"not one msgpack map: {type(error).__name__}: {error}") from error
    if not isinstance(fields, dict):
        raise BadMapError(f"a {type(fields).__name__}, not a map")
    return fields


def write_map(fields: Mapping[str, Any]) -> bytes:
    """The bytes of a map."""
    packed: bytes = msgpack.packb(fields)
    return packed


def _pairs(pairs: list[tuple[object, object]]) -> dict[str, object]:
    read: dict[str, object] = {}
    for key, value in pairs:
        if not isinstance(key, str):
            raise BadMapError(f"the key {key!r} is not a string")
        if key in read:
            raise BadMapError(f"the key {key!r} is there twice")
        read[key] = value
    return read


def _no_extension(code: int, _: bytes) -> object:
    raise BadMapError(f"extension type {code}")
