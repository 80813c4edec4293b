"""From a message to the event that it stands for, checked against the engine's memory.

Refuses tables that leave the cache or do not hold their tokens, before the offer table sees them.
"""

from collections.abc import Mapping

from kvbus.agent.local_engine import LocalEngine
from kvbus.agent.refusals import unknown_op
from kvbus.bus import Call
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import BlockTable, GroupSpec, num_blocks_for
from kvbus.protocol.message import from_body
from kvbus.protocol.peer import Claim, Confirm, PeerWithdraw, Release, Renew
from kvbus_prefill import offer_events as ev


def check_tables(engine: LocalEngine, tables: Mapping[str, BlockTable], num_tokens: int) -> None:
    """Raise `GeometryError` unless ``tables`` hold ``num_tokens`` tokens of every group."""
    groups = {group.name: group for group in engine.spec.groups}
    if tables.keys() != groups.keys():
        raise GeometryError(
            f"tables are of groups {sorted(tables)}, the engine has {sorted(groups)}"
        )
    for name, table in tables.items():
        _check_table(groups[name], table, num_tokens, engine.num_blocks(name))


def _check_table(group: GroupSpec, table: BlockTable, num_tokens: int, num_blocks: int) -> None:
    table.check_ids(num_blocks)
    if table.first_block and group.window is None:
        raise GeometryError(f"group '{group.name}' has no window, its table must start at block 0")
    needed = num_blocks_for(num_tokens, group.block_size)
    if table.first_block + len(table) < needed:
        raise GeometryError(
            f"group '{group.name}': {num_tokens} tokens need {needed} blocks, "
            f"the table ends at block {table.first_block + len(table)}",
            needed=needed,
            given=table.first_block + len(table),
        )


def peer_event(call: Call, *, boot: str) -> ev.RequestEvent:
    """The event of a request on the peer socket.

    Raises `ProtocolError` for one that is none, and `LocalError` (``stale``) for one that was
    meant for an earlier process than ``boot``.
    """
    match call.op:
        case Claim.op:
            claim = from_body(Claim, call.body)
            _refuse_stale(claim.agent_boot, boot)
            return ev.Claimed(claim.offer_id, claim.reader_id, claim.lease_s, call)
        case Renew.op:
            renew = from_body(Renew, call.body)
            _refuse_stale(renew.agent_boot, boot)
            return ev.Renewed(renew.offer_id, renew.epoch, renew.lease_s, renew.known_blocks, call)
        case Confirm.op:
            confirm = from_body(Confirm, call.body)
            _refuse_stale(confirm.agent_boot, boot)
            return ev.Confirmed(confirm.offer_id, confirm.epoch, call)
        case Release.op:
            release = from_body(Release, call.body)
            _refuse_stale(release.agent_boot, boot)
            return ev.Returned(release.offer_id, release.epoch, call)
        case PeerWithdraw.op:
            withdraw = from_body(PeerWithdraw, call.body)
            _refuse_stale(withdraw.agent_boot, boot)
            return ev.Withdrawn(withdraw.offer_id, call)
    raise unknown_op(call)


def _refuse_stale(meant_for: str, boot: str) -> None:
    if meant_for != boot:
        raise LocalError(
            "the message is for an earlier process of this agent",
            code=ErrorCode.STALE,
            theirs=meant_for,
            ours=boot,
        )
