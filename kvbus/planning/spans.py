"""Spans: the positions of each group's block table that a fetch, or a chunk of it, moves."""

from collections.abc import Iterable, Mapping

from kvbus.geometry import BlockTable, GroupSpec

Span = tuple[int, int]
"""Positions [lo, hi)."""
Spans = Mapping[str, Span]
Tables = Mapping[str, BlockTable]
NO_TABLES: Tables = {}


# Engines cache whole blocks. So a span includes requested tokens in front of the window that share
# its first block, as far as both sides have them. The holder drops whole blocks, too:
#
#     reader, blocks of 4    ....|...w|wwww|ww      w: the window, 7 tokens before the 14th
#     holder, blocks of 4        |mmmw|wwww|ww      m: moved with it; the reader's block is whole
#     holder, blocks of 2          |mw|ww|ww|ww     its first block has a gap of two tokens
class SpanMap:
    """Groups that the holder lacks are ignored."""

    def __init__(self, readers: Iterable[GroupSpec], holders: Iterable[GroupSpec]) -> None:
        held = {group.name: group.block_size for group in holders}
        pairs = [(reader, held[reader.name]) for reader in readers if reader.name in held]
        self._full = [one.name for one, _ in pairs if one.window is None and not one.state]
        self._windows = [(one, size) for one, size in pairs if one.window is not None]
        self._states = [one for one, _ in pairs if one.state]
        self._may_have_gaps = [one for one, size in self._windows if size % one.block_size]

    def whole(self, first_token: int, num_tokens: int) -> dict[str, Span]:
        spans = dict.fromkeys(self._full, (first_token, max(first_token, num_tokens)))
        for group, held_size in self._windows:
            start, stop = group.positions(first_token, num_tokens)
            if start < stop:
                sizes = (group.block_size, held_size)
                start = max(first_token, *(start // size * size for size in sizes))
            spans[group.name] = start, stop
        for group in self._states:
            spans[group.name] = group.positions(first_token, num_tokens)
        return spans

    def chunk(
        self, whole: Span, chunk: Span, *, last: bool, tables: Tables = NO_TABLES
    ) -> dict[str, Span]:
        """Return the spans of tokens [chunk) of a fetch of tokens [whole).

        A state comes with the ``last`` chunk, even an empty one. A block in ``tables`` requests a
        state even without tokens.
        """
        spans = self.whole(*whole)
        for name, (lo, hi) in spans.items():
            start = max(lo, chunk[0])
            spans[name] = start, max(start, min(hi, chunk[1]))
        for group in self._states:
            is_due = whole[0] < whole[1] and not group.optional
            is_wanted = is_due or tables.get(group.name)
            spans[group.name] = (0, 1) if last and is_wanted else (0, 0)
        return spans

    def fills_blocks(self, first_token: int, num_tokens: int) -> bool:
        """Return whether a complete fetch leaves no gap in a window's first block."""
        spans = self.whole(first_token, num_tokens) if self._may_have_gaps else {}
        for group in self._may_have_gaps:
            start, stop = group.positions(first_token, num_tokens)
            filled_from = max(first_token, start // group.block_size * group.block_size)
            if start < stop and spans[group.name][0] > filled_from:
                return False
        return True


def requested_states(groups: Iterable[GroupSpec], tables: Tables) -> frozenset[str]:
    return frozenset(one.name for one in groups if one.state and tables.get(one.name))


def tail_spans(groups: Iterable[GroupSpec], spans: Spans) -> Spans:
    tails = {}
    for group in groups:
        start, stop = spans[group.name]
        end = -(-stop // group.block_size) * group.block_size
        if start < stop < end:
            tails[group.name] = (stop, end)
    return tails
