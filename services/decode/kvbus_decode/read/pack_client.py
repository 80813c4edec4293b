"""Asks prefill agents for boxes in their staging slots, and gives the slots back."""

from collections.abc import Callable
from functools import partial

from kvbus.agent.process.service import Agent
from kvbus.errors import GeometryError, KVBusError
from kvbus.protocol.staging import Pack, Packed, Unpack
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.route import Source
from kvbus_decode.read import events as ev
from kvbus_decode.read.jobs import BoxJob

UNPACK_TIMEOUT_S = 5.0


class PackClient:
    """The requests `Pack` and `Unpack`; ``dispatch`` takes the answers."""

    def __init__(
        self, agent: Agent, config: DecodeConfig, dispatch: Callable[[ev.Event], None]
    ) -> None:
        self._agent, self._config, self._dispatch = agent, config, dispatch

    def ask(self, command: ev.AskPack) -> None:
        """Ask for the box of a leg; what its READs are is found out meanwhile."""
        work: BoxJob = command.leg.work
        chunk, source = work.chunk, work.source
        message = Pack(
            agent_boot=source.agent_boot,
            engine_id=chunk.route.prefill.engine_id,
            memory_id=source.memory_id,
            offer_id=chunk.offer_id,
            epoch=chunk.epoch,
            rank=work.share.holder,
            box=work.box,
            order=work.order,
            table=work.blocks(),
            slot_lease_s=self._config.lease_s,
            token=chunk.token,
            access=source.access,
            done=command.done,
            priority=chunk.priority,
        )
        timeout_s = max(1e-3, chunk.deadline - self._agent.loop.time())
        source.peer.ask(message, timeout_s, partial(self._on_reply, command))
        if not command.leg.needs_slot:
            try:
                work.reads = work.block_reads()
            except KVBusError as error:
                self._dispatch(ev.PackFailed(command.key, command.leg, error))

    def release(self, command: ev.ReleaseSlots) -> None:
        """Give slots back; when that fails they come back by themselves, with their lease."""
        source = command.source
        if isinstance(source, Source):
            message = Unpack(agent_boot=source.agent_boot, slot_ids=command.slot_ids)
            source.peer.ask(message, UNPACK_TIMEOUT_S, lambda _: None)

    def _on_reply(self, command: ev.AskPack, packed: Packed | KVBusError) -> None:
        leg, work = command.leg, command.leg.work
        if not isinstance(packed, KVBusError) and packed.num_bytes != work.num_bytes:
            self.release(ev.ReleaseSlots(work.source, (packed.slot_id,)))
            packed = GeometryError(
                f"the prefill agent packed {packed.num_bytes} bytes, the box has {work.num_bytes}"
            )
        if isinstance(packed, KVBusError):
            self._dispatch(ev.PackFailed(command.key, leg, packed))
            return
        work.packed = packed
        self._dispatch(ev.SlotPacked(command.key, leg, packed.slot_id, packed.slot_lease_s))
