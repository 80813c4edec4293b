"""Spans: which positions of each group's block table one chunk of a fetch moves.

A span may be empty: then its group needs no blocks.
"""

from collections.abc import Iterable, Mapping

from kvbus.geometry import GroupSpec

Spans = Mapping[str, tuple[int, int]]
"""Positions [lo, hi) by group."""


def whole_spans(groups: Iterable[GroupSpec], first_token: int, num_tokens: int) -> Spans:
    """What a fetch of tokens [first_token, num_tokens) moves."""
    return {group.name: group.positions(first_token, num_tokens) for group in groups}


def chunk_spans(
    groups: Iterable[GroupSpec],
    whole: tuple[int, int],
    chunk: tuple[int, int],
    *,
    last: bool,
) -> Spans:
    """What tokens [chunk) of a fetch of tokens [whole) move.

    A state is that of the last token: it comes with the ``last`` chunk, even an empty one.
    """
    spans = {}
    for group in groups:
        lo, hi = group.positions(*whole)
        if group.state:
            spans[group.name] = (lo, hi if last else lo)
        else:
            start = max(lo, chunk[0])
            spans[group.name] = (start, max(start, min(hi, chunk[1])))
    return spans


def tail_spans(groups: Iterable[GroupSpec], spans: Spans) -> Spans:
    """The unused positions of each group's last block, behind those of the whole ``spans``."""
    tails = {}
    for group in groups:
        start, stop = spans[group.name]
        end = -(-stop // group.block_size) * group.block_size
        if start < stop < end:
            tails[group.name] = (stop, end)
    return tails
