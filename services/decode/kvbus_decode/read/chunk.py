"""A chunk: tokens of a fetch that are read together.

Refuses tables that leave the cache or are not exactly the blocks of the tokens, before any byte
moves.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.errors import GeometryError
from kvbus.geometry import BlockTable, Box, num_blocks_for
from kvbus.planning import Spans, chunk_spans, tail_spans, whole_spans
from kvbus_decode.peer.route import Route


def check_tables(
    engine: LocalEngine, tables: Mapping[str, BlockTable], first_token: int, num_tokens: int
) -> None:
    """Raise `GeometryError` unless ``tables`` are exactly the blocks that the tokens need."""
    groups = {group.name: group for group in engine.spec.groups}
    if tables.keys() != groups.keys():
        raise GeometryError(
            f"tables are of groups {sorted(tables)}, the engine has {sorted(groups)}"
        )
    for name, table in tables.items():
        table.check_ids(engine.num_blocks(name))
        start, stop = groups[name].positions(first_token, num_tokens)
        table.check_covers(start, stop, groups[name].block_size)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Positions by group, from the offer's blocks into the fetch's.

    ``replica_index`` chooses among ranks that hold the same. ``tail`` are positions behind the last
    token that are zeroed after the read. ``epoch`` and ``token`` are those of the
    lease, ``secret`` is the ticket's, ``deadline`` a time of the event loop. About one in
    ``one_in`` pieces is compared after the read, none with 0.
    """

    route: Route
    offer_id: str
    epoch: int
    token: str = field(repr=False)
    source: Mapping[str, BlockTable]
    target: Mapping[str, BlockTable]
    spans: Spans
    tail: Spans
    replica_index: int
    deadline: float
    secret: str = field(repr=False)
    one_in: int
    priority: int

    def blocks_of(self, box: Box) -> BlockTable:
        """The prefill engine's blocks that hold a box."""
        table = self.source[box.group]
        size = self.route.prefill.group(box.group).block_size
        first, end = box.start // size, num_blocks_for(box.stop, size)
        at = first - table.first_block
        return BlockTable(ids=table.ids[4 * at : 4 * (at + end - first)], first_block=first)


def make_chunk(
    route: Route,
    *,
    offer_id: str,
    epoch: int,
    token: str,
    source: Mapping[str, BlockTable],
    target: Mapping[str, BlockTable],
    whole: tuple[int, int],
    part: tuple[int, int],
    last: bool,
    zero_tail: bool,
    replica_index: int,
    deadline: float,
    secret: str,
    one_in: int,
    priority: int,
) -> Chunk:
    """Tokens [part) of a fetch of tokens [whole); with the ``last`` chunk comes the state, and the
    tail if it is zeroed. Raises `GeometryError` when the offer's tables do not hold them.
    """
    groups = route.engine.spec.groups
    spans = chunk_spans(groups, route.prefill.groups, whole, part, last=last)
    route.check_tables(source, spans)
    tail: Spans = {}
    if zero_tail and last:
        tail = tail_spans(groups, whole_spans(groups, groups, *whole))
    lease, tables, place = (offer_id, epoch, token), (source, target), (replica_index, deadline)
    return Chunk(route, *lease, *tables, spans, tail, *place, secret, one_in, priority)
