"""From an engine's fetch to the event that it stands for, checked against the engine's memory.

Refuses tables that leave the cache or are not exactly the blocks of the tokens, before any byte
moves.
"""

from collections.abc import Mapping

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.errors import GeometryError, LocalError
from kvbus.geometry import BlockTable
from kvbus.protocol.engine import StartFetch
from kvbus.protocol.ticket import Ticket
from kvbus_decode.fetch import events as ev


def fetch_event(
    engine: LocalEngine, fetch: StartFetch, *, timeout_s: float, reply_to: object
) -> ev.Requested:
    """The event of ``fetch``; raises `ProtocolError`, `LocalError` or `GeometryError`."""
    ticket = Ticket.from_json(fetch.ticket)
    if fetch.first_token > fetch.num_tokens:
        raise LocalError(
            f"first_token {fetch.first_token} is behind num_tokens {fetch.num_tokens}",
            field="first_token",
        )
    check_tables(engine, fetch.tables, fetch.first_token, fetch.num_tokens)
    return ev.Requested(
        fetch_id=fetch.fetch_id,
        engine_id=engine.engine_id,
        ticket=ticket,
        first_token=fetch.first_token,
        num_tokens=fetch.num_tokens,
        tables=fetch.tables,
        timeout_s=fetch.timeout_s or timeout_s,
        has_state=any(group.state for group in engine.spec.groups),
        zero_tail=fetch.zero_tail,
        chunk_tokens=fetch.chunk_tokens,
        reply_to=reply_to,
    )


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
