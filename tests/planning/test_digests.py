"""Which pieces of KV are compared: all of a box once, and the same choice however it is cut."""

import tracemalloc
from hashlib import blake2b
from itertools import product
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.geometry import BlockTable, Box, EngineSpec, GroupSpec
from kvbus.planning import (
    Piece,
    PieceMap,
    Share,
    chosen_pieces,
    cut_for_digests,
    num_pieces,
    piece_of,
)
from tests.examples import num_examples
from tests.planning.handoffs import placed_ranks

MASK = 2**64 - 1


@st.composite
def shares(draw: st.DrawFn) -> Share:
    layers = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5, unique=True))
    parts = draw(st.sampled_from([("k", "v"), ("latent",), ("v", "k")]))
    first, num_heads = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    return Share(0, 1, "full", tuple(sorted(layers)), parts, first, num_heads)


def by_loops(share: Share, span: tuple[int, int]) -> list[Piece]:
    """All pieces of a share, position by position."""
    found: dict[tuple[int, str, int, int], list[int]] = {}
    heads = range(share.first_head, share.first_head + share.num_heads)
    for position in range(*span):
        for layer, part, head in product(share.layers, share.parts, heads):
            found.setdefault((layer, part, head, position // 16), []).append(position)
    return [
        Piece(layer, part, head, positions[0], positions[-1] + 1)
        for (layer, part, head, _), positions in found.items()
    ]


def is_chosen(piece: Piece, offer_id: str, one_in: int) -> bool:
    """The definition, number by number."""
    seed = blake2b(f"{offer_id}/full".encode(), digest_size=8).digest()
    number = int.from_bytes(seed, "little")
    for more in (piece.layer, piece.head, piece.start // 16):
        number = number + more & MASK
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK
        number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK
        number ^= number >> 31
    return number % one_in == 0


@settings(max_examples=num_examples(400), deadline=None)
@given(
    share=shares(),
    ends=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    most=st.integers(1, 300),
    one_in=st.sampled_from([1, 2, 3, 64]),
    offer_id=st.text(max_size=9),
)
def test_boxes_have_each_piece_once_and_both_sides_choose_the_same_however_they_are_cut(
    share: Share, ends: tuple[int, int], most: int, one_in: int, offer_id: str
) -> None:
    span = min(ends), max(ends)

    boxes = list(cut_for_digests(share, span, most=most))

    wanted, least = by_loops(share, span), len(share.parts) * share.num_heads
    assert all(num_pieces(box) <= max(most, least) for box in boxes)
    assert sorted(wanted) == sorted(
        piece_of(box, number) for box in boxes for number in range(num_pieces(box))
    )
    assert sorted(piece for piece in wanted if is_chosen(piece, offer_id, one_in)) == sorted(
        piece_of(box, number)
        for box in boxes
        for number in chosen_pieces(box, offer_id=offer_id, one_in=one_in).tolist()
    )


def test_what_is_kept_of_boxes_that_readers_choose_is_bounded() -> None:
    """A reader may ask for any choice of layers, in any order."""
    group = GroupSpec("full", tuple(range(8)), 16, 2, 8, "float16")
    pieces_at = PieceMap(placed_ranks(EngineSpec("engine", "model", 1, (group,)))[0])
    table, layers = BlockTable.of([0]), list(range(8))
    kept_bytes = []

    tracemalloc.start()
    for number in range(600):
        Random(number).shuffle(layers)
        pieces_at.lattices(Box("full", tuple(layers), ("k", "v"), 0, 2, 0, 16), table)
        kept_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()

    assert kept_bytes[-1] - kept_bytes[200] < kept_bytes[200] - kept_bytes[0]
