"""From a message to the event that it stands for, checked against the engine's memory.

Refuses tables that leave the cache or do not hold their tokens, before the offer table sees them.
"""

from collections.abc import Mapping

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.refusals import unknown_op
from kvbus.bus import Call
from kvbus.errors import ErrorCode, GeometryError, LocalError
from kvbus.geometry import BlockTable, GroupSpec, num_blocks_for
from kvbus.protocol.message import from_body
from kvbus.protocol.peer import Claim, Confirm, PeerWithdraw, Release, Renew
from kvbus_prefill.offer import events as ev

NO_BLOCKS = BlockTable(b"")


def check_tables(
    engine: LocalEngine, tables: Mapping[str, BlockTable], num_tokens: int, *, sealed: bool
) -> None:
    """Raise `GeometryError` unless ``tables`` hold what ``num_tokens`` tokens need of each group.

    While an offer is open, a group may have no table yet if no token needs it, and one with a
    window may lack blocks that its end does not need.
    """
    groups = {group.name: group for group in engine.spec.groups}
    if tables.keys() - groups.keys() or (sealed and tables.keys() != groups.keys()):
        raise GeometryError(
            f"tables are of groups {sorted(tables)}, the engine has {sorted(groups)}"
        )
    for name, group in groups.items():
        table = tables.get(name, NO_BLOCKS)
        table.check_ids(engine.num_blocks(name))
        _check_table(group, table, num_tokens, sealed=sealed)


def _check_table(group: GroupSpec, table: BlockTable, num_tokens: int, *, sealed: bool) -> None:
    start, stop = group.positions(0, num_tokens)
    needed, given = num_blocks_for(stop, group.block_size), table.first_block + len(table)
    if given < needed:
        raise GeometryError(
            f"group '{group.name}': {num_tokens} tokens need {needed} blocks, "
            f"the table ends at block {given}",
            needed=needed,
            given=given,
        )
    if group.state and given > 1:
        raise GeometryError(
            f"group '{group.name}' is a state: its table has one block, not {given}", given=given
        )
    if group.window is None and table.first_block:
        raise GeometryError(f"group '{group.name}' has no window, its table must start at block 0")
    if sealed and stop > start and table.first_block > start // group.block_size:
        raise GeometryError(
            f"group '{group.name}': a window of {group.window} tokens before token {num_tokens} "
            f"starts in block {start // group.block_size}, the table in {table.first_block}",
            needed=start // group.block_size,
            given=table.first_block,
        )


def peer_event(call: Call, *, boot: str) -> ev.RequestEvent:
    """The event of a request on the peer socket.

    Raises `ProtocolError` for one that is none, and `LocalError` (``stale``) for one that was
    meant for an earlier process than ``boot``.
    """
    match call.op:
        case Claim.op:
            claim = from_body(Claim, call.body)
            refuse_stale_boot(claim.agent_boot, boot)
            return ev.Claimed(claim.offer_id, claim.reader_id, claim.lease_s, call)
        case Renew.op:
            renew = from_body(Renew, call.body)
            refuse_stale_boot(renew.agent_boot, boot)
            return ev.Renewed(renew.offer_id, renew.epoch, renew.lease_s, renew.known_blocks, call)
        case Confirm.op:
            confirm = from_body(Confirm, call.body)
            refuse_stale_boot(confirm.agent_boot, boot)
            return ev.Confirmed(confirm.offer_id, confirm.epoch, call)
        case Release.op:
            release = from_body(Release, call.body)
            refuse_stale_boot(release.agent_boot, boot)
            return ev.Returned(release.offer_id, release.epoch, call)
        case PeerWithdraw.op:
            withdraw = from_body(PeerWithdraw, call.body)
            refuse_stale_boot(withdraw.agent_boot, boot)
            return ev.Withdrawn(withdraw.offer_id, call)
    raise unknown_op(call)


def refuse_stale_boot(meant_for: str, boot: str) -> None:
    """Raise `LocalError` (``stale``) for a message to an earlier process than ``boot``."""
    if meant_for != boot:
        raise LocalError(
            "the message is for an earlier process of this agent",
            code=ErrorCode.STALE,
            theirs=meant_for,
            ours=boot,
        )
