"""From an engine's fetch to the event that it stands for, checked against the engine's memory.

Refuses tables that leave the cache or are not exactly the blocks of the tokens, before any byte
moves.
"""

from kvbus.agent.local_engine import LocalEngine
from kvbus.errors import GeometryError, LocalError
from kvbus.protocol.engine import Fetch
from kvbus.protocol.ticket import Ticket
from kvbus_decode import fetch_events as ev


def fetch_event(
    engine: LocalEngine, fetch: Fetch, *, timeout_s: float, reply_to: object
) -> ev.Requested:
    """The event of ``fetch``; raises `ProtocolError`, `LocalError` or `GeometryError`."""
    ticket = Ticket.from_json(fetch.ticket)
    if fetch.first_token > fetch.num_tokens:
        raise LocalError(
            f"first_token {fetch.first_token} is behind num_tokens {fetch.num_tokens}",
            field="first_token",
        )
    _check_tables(engine, fetch)
    return ev.Requested(
        fetch_id=fetch.fetch_id,
        engine_id=engine.engine_id,
        ticket=ticket,
        first_token=fetch.first_token,
        num_tokens=fetch.num_tokens,
        tables=fetch.tables,
        timeout_s=fetch.timeout_s or timeout_s,
        reply_to=reply_to,
    )


def _check_tables(engine: LocalEngine, fetch: Fetch) -> None:
    groups = {group.name: group for group in engine.spec.groups}
    if fetch.tables.keys() != groups.keys():
        raise GeometryError(
            f"tables are of groups {sorted(fetch.tables)}, the engine has {sorted(groups)}"
        )
    for name, table in fetch.tables.items():
        table.check_ids(engine.num_blocks(name))
        table.check_covers(fetch.first_token, fetch.num_tokens, groups[name].block_size)
