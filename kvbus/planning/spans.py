"""Spans: which positions of each group's block table a fetch, or one chunk of it, moves.

A span may be empty: then its group needs no blocks. Of a window more is moved than its tokens, as
engines cache whole blocks: the tokens in front of it that share its first block, if they are asked
for. They come as far as both sides have them, as the holder drops whole blocks, too:

    reader, blocks of 4    ....|...w|wwww|ww      w: the window, 7 tokens before the 14th
    holder, blocks of 4        |mmmw|wwww|ww      m: moved with it; the reader's block is whole
    holder, blocks of 2          |mw|ww|ww|ww     its first block has a gap of two tokens
"""

from collections.abc import Iterable, Mapping

from kvbus.geometry import BlockTable, GroupSpec

Span = tuple[int, int]
"""Positions [lo, hi)."""
Spans = Mapping[str, Span]
"""By group."""
Tables = Mapping[str, BlockTable]
NO_TABLES: Tables = {}


class SpanMap:
    """What fetches move from the groups of one engine, the holder, to those of a reader.

    Groups that the holder has not are left out.
    """

    def __init__(self, readers: Iterable[GroupSpec], holders: Iterable[GroupSpec]) -> None:
        held = {group.name: group.block_size for group in holders}
        pairs = [(reader, held[reader.name]) for reader in readers if reader.name in held]
        self._full = [one.name for one, _ in pairs if one.window is None and not one.state]
        self._windows = [(one, size) for one, size in pairs if one.window is not None]
        self._states = [one for one, _ in pairs if one.state]
        self._may_have_gaps = [one for one, size in self._windows if size % one.block_size]

    def whole(self, first_token: int, num_tokens: int) -> dict[str, Span]:
        """What a fetch of tokens [first_token, num_tokens) moves."""
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
        """What tokens [chunk) of a fetch of tokens [whole) move.

        A state is that of the last token: it comes with the ``last`` chunk, even an empty one. One
        for which ``tables`` have a block is wanted though no token may be; an optional one for
        which they have none is not.
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
        """Whether no window's first block has a gap once all of a fetch is there."""
        spans = self.whole(first_token, num_tokens) if self._may_have_gaps else {}
        for group in self._may_have_gaps:
            start, stop = group.positions(first_token, num_tokens)
            filled_from = max(first_token, start // group.block_size * group.block_size)
            if start < stop and spans[group.name][0] > filled_from:
                return False
        return True


def asked_states(groups: Iterable[GroupSpec], tables: Tables) -> frozenset[str]:
    """The states that a fetch wants: those that it has a block for."""
    return frozenset(one.name for one in groups if one.state and tables.get(one.name))


def tail_spans(groups: Iterable[GroupSpec], spans: Spans) -> Spans:
    """The unused positions of each group's last block, behind those of the whole ``spans``."""
    tails = {}
    for group in groups:
        start, stop = spans[group.name]
        end = -(-stop // group.block_size) * group.block_size
        if start < stop < end:
            tails[group.name] = (stop, end)
    return tails
