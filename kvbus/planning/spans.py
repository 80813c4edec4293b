"""Spans: which positions of each group's block table one chunk of a fetch moves.

A span may be empty: then its group needs no blocks. Of a window more is moved than its tokens, as
engines cache whole blocks: the tokens in front of it that share its first block, if they are asked
for. They come as far as both sides have them, as the holder drops whole blocks, too:

    reader, blocks of 4    ....|...w|wwww|ww      w: the window, 7 tokens before the 14th
    holder, blocks of 4        |mmmw|wwww|ww      m: moved with it; the reader's block is whole
    holder, blocks of 2          |mw|ww|ww|ww     its first block has a gap of two tokens
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from kvbus.geometry import BlockTable, GroupSpec

Spans = Mapping[str, tuple[int, int]]
"""Positions [lo, hi) by group."""


def whole_spans(
    readers: Iterable[GroupSpec],
    holders: Sequence[GroupSpec],
    first_token: int,
    num_tokens: int,
) -> Spans:
    """What a fetch of tokens [first_token, num_tokens) moves from groups to those of a reader."""
    held = {group.name: group for group in holders}
    return {
        group.name: _span(group, held[group.name], first_token, num_tokens) for group in readers
    }


def chunk_spans(
    readers: Iterable[GroupSpec],
    holders: Sequence[GroupSpec],
    whole: tuple[int, int],
    chunk: tuple[int, int],
    *,
    last: bool,
    states: Collection[str] = (),
) -> Spans:
    """What tokens [chunk) of a fetch of tokens [whole) move.

    A state is that of the last token: it comes with the ``last`` chunk, even an empty one. Those
    called ``states`` are wanted though no token may be.
    """
    held = {group.name: group for group in holders}
    spans = {}
    for group in readers:
        lo, hi = _span(group, held[group.name], *whole)
        if group.name in states:
            lo, hi = 0, 1
        if group.state:
            spans[group.name] = (lo, hi if last else lo)
        else:
            start = max(lo, chunk[0])
            spans[group.name] = (start, max(start, min(hi, chunk[1])))
    return spans


def asked_states(groups: Iterable[GroupSpec], tables: Mapping[str, BlockTable]) -> frozenset[str]:
    """The states that a fetch wants: those that it has a block for."""
    return frozenset(one.name for one in groups if one.state and tables.get(one.name))


def _span(
    reader: GroupSpec, holder: GroupSpec, first_token: int, num_tokens: int
) -> tuple[int, int]:
    start, stop = reader.positions(first_token, num_tokens)
    if reader.window is not None and start < stop:
        sizes = (reader.block_size, holder.block_size)
        start = max(first_token, *(start // size * size for size in sizes))
    return start, stop


def tail_spans(groups: Iterable[GroupSpec], spans: Spans) -> Spans:
    """The unused positions of each group's last block, behind those of the whole ``spans``."""
    tails = {}
    for group in groups:
        start, stop = spans[group.name]
        end = -(-stop // group.block_size) * group.block_size
        if start < stop < end:
            tails[group.name] = (stop, end)
    return tails
