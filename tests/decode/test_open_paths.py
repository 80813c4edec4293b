"""Which paths are left when one side is unregistered, or has no slots, and who is named."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.errors import ConfigError
from kvbus.planning import Path
from kvbus_decode.read.open_paths import open_paths

DIRECT, PACKED, REORDERED, MAPPED = Path.DIRECT, Path.PACKED, Path.REORDERED, Path.MAPPED


def route(
    prefill: bool, decode: bool, *slots: int, maps: str = "none", on_host: bool = True
) -> Any:
    """A route between engines that are direct or not; ``slots`` are those of its sources.

    ``maps`` says how much of their memory is mapped here; ``on_host`` whether ours can be.
    """
    sources = [source(number, size, maps) for number, size in enumerate(slots)]
    return SimpleNamespace(
        prefill_direct=prefill,
        decode_direct=decode,
        decode_mapped=on_host,
        sources=sources,
        is_mapped=on_host and all(one.mapped and one.mapped.is_open for one in sources),
    )


def source(number: int, slot_bytes: int, maps: str, *, knows: bool = True) -> SimpleNamespace:
    """The first source is mapped unless ``maps`` is none; others only if it is all.

    NIXL ``knows`` their memory.
    """
    is_mapped = maps == "all" or (maps != "none" and number == 0)
    closed = "it was cut" if maps == "closed" else ""
    mapped = SimpleNamespace(closed=closed, is_open=not closed) if is_mapped else None
    return SimpleNamespace(
        slot_bytes=slot_bytes,
        peer=SimpleNamespace(endpoint=f"tcp://prefill-{number}"),
        mapped=mapped,
        nixl="known" if knows else None,
        unmapped="" if mapped else "it is elsewhere",
    )


@pytest.mark.parametrize(
    ("prefill", "decode", "slots", "packs_here", "left"),
    [
        (True, True, (8, 8), True, (DIRECT, PACKED, REORDERED)),
        (True, True, (8, 8), False, (DIRECT, REORDERED)),
        (True, True, (8, 0), True, (DIRECT,)),
        (False, True, (8,), True, (PACKED, REORDERED)),
        (False, True, (8,), False, (REORDERED,)),
        (True, False, (8,), True, (PACKED,)),
        (False, False, (8,), True, (PACKED,)),
    ],
)
def test_paths_that_both_sides_can_take_are_open(
    prefill: bool, decode: bool, slots: tuple[int, ...], packs_here: bool, left: tuple[Path, ...]
) -> None:
    assert open_paths(route(prefill, decode, *slots), "auto", packs_here=packs_here) == left


@pytest.mark.parametrize(
    ("prefill", "decode", "slots", "packs_here", "words"),
    [
        (False, True, (8, 0), True, r"prefill engine is unregistered.*prefill-1\)"),
        (True, False, (0, 8), True, r"decode engine is unregistered.*prefill-0\)"),
        (True, False, (8,), False, "decode engine is unregistered.*0 at the decode agent"),
        (False, False, (8,), False, "decode engine is unregistered.*0 at the decode agent"),
    ],
)
def test_where_none_is_left_the_key_and_both_sides_are_named(
    prefill: bool, decode: bool, slots: tuple[int, ...], packs_here: bool, words: str
) -> None:
    with pytest.raises(ConfigError, match="'staging_bytes' is 0") as refused:
        open_paths(route(prefill, decode, *slots), "auto", packs_here=packs_here)

    assert refused.match(words)
    assert refused.value.detail == {"key": "staging_bytes"}


@pytest.mark.parametrize("direct", [True, False])
def test_memory_that_is_mapped_is_open_registered_or_not(direct: bool) -> None:
    way = route(direct, direct, 0, 0, maps="all")

    assert open_paths(way, "mapped", packs_here=False) == (MAPPED,)
    assert MAPPED in open_paths(way, "auto", packs_here=False)


@pytest.mark.parametrize(
    ("maps", "on_host", "words"),
    [
        ("none", True, r"prefill-0\) is not mapped here: it is elsewhere"),
        ("some", True, r"prefill-1\) is not mapped here: it is elsewhere"),
        ("closed", True, r"prefill-0\) is not mapped here: it was cut"),
        ("all", False, "the decode engine is on a GPU"),
    ],
)
def test_the_mapped_path_is_refused_with_the_reason_that_it_is_closed(
    maps: str, on_host: bool, words: str
) -> None:
    way = route(True, True, 8, 8, maps=maps, on_host=on_host)

    with pytest.raises(ConfigError, match=f"forces 'mapped', but .*{words}"):
        open_paths(way, "mapped", packs_here=True)
    assert MAPPED not in open_paths(way, "auto", packs_here=True)


def test_a_forced_path_is_taken_or_refused_and_no_other_is() -> None:
    for prefill, decode, slots, here in product([True, False], [True, False], [0, 8], [0, 1]):
        way = route(prefill, decode, slots)
        for wanted in Path:
            can = {
                DIRECT: prefill and decode,
                PACKED: bool(slots and here),
                REORDERED: bool(slots and decode),
                Path.MAPPED: False,
            }
            if can[wanted]:
                assert open_paths(way, wanted.value, packs_here=bool(here)) == (wanted,)
            else:
                with pytest.raises(ConfigError, match=f"forces '{wanted.value}', but"):
                    open_paths(way, wanted.value, packs_here=bool(here))
