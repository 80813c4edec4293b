"""Pieces of KV that are compared: each of a tile once, and the same choice for any cut."""

from hashlib import blake2b
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbus.planning import Piece, Share, chosen_tiles, cut_for_digests, num_pieces, piece_of
from tests.support.examples import num_examples

MASK = 2**64 - 1


@st.composite
def shares(draw: st.DrawFn) -> Share:
    layers = draw(st.lists(st.integers(0, 90), min_size=1, max_size=5, unique=True))
    parts = draw(st.sampled_from([("k", "v"), ("latent",), ("v", "k")]))
    first, num_heads = draw(st.integers(0, 40)), draw(st.integers(1, 5))
    return Share(0, 1, "full", tuple(sorted(layers)), parts, first, num_heads)


def by_loops(share: Share, span: tuple[int, int]) -> list[Piece]:
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
    for more in (piece.layer, piece.start // 16):
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
def test_tiles_hold_each_piece_once_and_any_cut_chooses_same(
    share: Share, ends: tuple[int, int], most: int, one_in: int, offer_id: str
) -> None:
    span = min(ends), max(ends)
    tiles = list(cut_for_digests(share, span, most=most))
    wanted, least = by_loops(share, span), len(share.parts) * share.num_heads
    assert all(num_pieces(tile) <= max(most, least) for tile in tiles)
    for least_in in (1, one_in):
        chosen = [list(chosen_tiles(tile, offer_id=offer_id, one_in=least_in)) for tile in tiles]
        assert sorted(piece for piece in wanted if is_chosen(piece, offer_id, least_in)) == sorted(
            piece_of(found, number)
            for found in chosen
            for number in range(sum(map(num_pieces, found)))
        )
