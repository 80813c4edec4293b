"""Which pieces of KV are compared: all of a box once, and the same choice however it is cut."""

import tracemalloc
from hashlib import blake2b
from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.geometry import BlockTable, Box, EngineSpec, GroupSpec, KvLayout, lay_out_rank
from kvbus.planning import (
    Piece,
    PieceMap,
    PlacedRank,
    Share,
    chosen_pieces,
    cut_for_digests,
    digests,
    num_pieces,
    piece_of,
)
from tests.examples import num_examples

EXAMPLES = settings(max_examples=num_examples(400), deadline=None)
MASK = 2**64 - 1


@st.composite
def shares(draw: st.DrawFn) -> Share:
    layers = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5, unique=True))
    parts = draw(st.sampled_from([("k", "v"), ("latent",), ("v", "k")]))
    first, num_heads = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    return Share(0, 1, "full", tuple(sorted(layers)), parts, first, num_heads)


@st.composite
def spans(draw: st.DrawFn) -> tuple[int, int]:
    stop = draw(st.integers(0, 200))
    return draw(st.integers(0, stop)), stop


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


@EXAMPLES
@given(shares(), spans(), st.integers(1, 300))
def test_boxes_have_each_piece_once_and_no_more_than_a_reply_holds(
    share: Share, span: tuple[int, int], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "MAX_PIECES", most)
        boxes = list(cut_for_digests(share, span))

    found = [piece_of(box, number) for box in boxes for number in range(num_pieces(box))]
    assert sorted(found) == sorted(by_loops(share, span))
    least = len(share.parts) * share.num_heads
    assert all(num_pieces(box) <= max(most, least) for box in boxes)


@EXAMPLES
@given(shares(), spans(), st.sampled_from([1, 2, 3, 64]), st.integers(1, 300), st.text(max_size=9))
def test_both_sides_choose_the_same_pieces_however_boxes_are_cut(
    share: Share, span: tuple[int, int], one_in: int, most: int, name: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "MAX_PIECES", most)
        boxes = list(cut_for_digests(share, span))

    chosen = [
        piece_of(box, number)
        for box in boxes
        for number in chosen_pieces(box, offer_id=name, one_in=one_in).tolist()
    ]
    wanted = [piece for piece in by_loops(share, span) if is_chosen(piece, name, one_in)]
    assert sorted(chosen) == sorted(wanted)


def test_about_one_in_so_many_is_chosen_and_others_for_another_offer() -> None:
    box = Box("full", tuple(range(32)), ("k", "v"), 0, 8, 0, 2048)

    one, other = (chosen_pieces(box, offer_id=name, one_in=64).tolist() for name in ("a", "b"))

    assert num_pieces(box) / 64 * 0.9 < len(one) < num_pieces(box) / 64 * 1.1
    assert len(set(one) & set(other)) < len(one) / 10


def test_what_is_kept_of_boxes_that_readers_choose_is_bounded() -> None:
    """A reader may ask for any choice of layers, in any order."""
    group = GroupSpec("full", tuple(range(8)), 16, 2, 8, "float16")
    engine = EngineSpec("engine", "model", 1, (group,), 1)
    rank = lay_out_rank(engine, 0, KvLayout.parse("NHD"), num_blocks={"full": 2})
    pieces_at = PieceMap(PlacedRank(engine, rank, {"kv": 1 << 40}))
    table, layers = BlockTable.of([0]), list(range(8))
    kept_bytes = []

    def ask(number: int) -> None:
        Random(number).shuffle(layers)
        box = Box("full", tuple(layers), ("k", "v"), 0, 2, 0, 16)
        assert len(pieces_at.lattices(box, table)) == 1

    tracemalloc.start()
    for number in range(600):
        ask(number)
        kept_bytes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()

    assert kept_bytes[-1] - kept_bytes[200] < kept_bytes[200] - kept_bytes[0]
