"""The staging slots of an agent; the data process holds them, the service assigns them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import anyio
import structlog

from kvbus.agent.probe import LET_NICS_READ, MeasuredRead, measure_vram_read
from kvbus.data import messages as wire
from kvbus.data.client import DataProcess, Defined
from kvbus.data.messages import HOST
from kvbus.errors import (
    ConfigError,
    ErrorCode,
    GeometryError,
    KVBusError,
    LocalError,
    SegmentError,
    TransferFailed,
)

log = structlog.get_logger()

MeasureRead = Callable[[str], Awaitable[MeasuredRead]]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlots:
    device: str
    num_slots: int
    slot_bytes: int
    defined: Defined

    def address(self, slot: int) -> int:
        if not 0 <= slot < self.num_slots:
            raise GeometryError(f"slot {slot} of {self.num_slots} slots", slot=slot)
        return self._opened.address + slot * self.slot_bytes

    @property
    def memory_kind(self) -> wire.MemoryKind:
        return self._opened.memory_kind

    @property
    def nixl_device(self) -> int:
        return self._opened.nixl_device

    @property
    def is_open(self) -> bool:
        return isinstance(self.defined.result, wire.SlotsOpened)

    @property
    def gpu_bytes(self) -> int | None:
        return self._opened.gpu_bytes

    @property
    def _opened(self) -> wire.SlotsOpened:
        opened = self.defined.result
        if not isinstance(opened, wire.SlotsOpened):
            raise LocalError("the data process is starting again", code=ErrorCode.BUSY)
        return opened


class StagingDevices:
    """The host's slots exist after `open`, a GPU's after its first use.

    With ``only``, NIXL registers only slots, never the engines' own memory. With ``on_gpu``, the
    slots for GPUs are in GPU memory, and no READ is measured.
    """

    def __init__(
        self,
        data: DataProcess,
        *,
        staging_bytes: int,
        slot_bytes: int,
        only: bool,
        nic_reads_gpu: bool = False,
        on_gpu: bool = False,
        measure_read: MeasureRead = measure_vram_read,
    ) -> None:
        self.only = only
        self.num_slots = staging_bytes // slot_bytes
        self.slot_bytes = slot_bytes if self.num_slots else 0
        self._data, self._nic_reads_gpu, self._measure_read = data, nic_reads_gpu, measure_read
        self._on_gpu = on_gpu
        self._slots: dict[str, DeviceSlots] = {}
        self._lock = anyio.Lock()

    async def open(self) -> None:
        if not self.packs:
            return
        try:
            await self.make(HOST)
        except SegmentError as error:
            message = f"key 'staging_bytes': {error.message}"
            raise SegmentError(message, code=error.code, **error.detail) from error

    @property
    def registered_bytes(self) -> int:
        return len(self._slots) * self.num_slots * self.slot_bytes

    @property
    def packs(self) -> bool:
        return self.num_slots > 0

    def check_packs(self) -> None:
        if not self.packs:
            raise ConfigError(
                "this agent packs nothing: key 'staging_bytes' of its configuration is 0",
                key="staging_bytes",
            )

    def at(self, device: str) -> DeviceSlots:
        slots = self._slots.get(device)
        if slots is None:
            self.check_packs()
            raise LocalError(f"no staging slots for {device}", code=ErrorCode.INTERNAL)
        return slots

    def gpu_bytes(self) -> dict[str, int]:
        """Return what the data process has taken of each GPU, as far as known."""
        found: dict[str, int] = {}
        for device, slots in self._slots.items():
            with suppress(LocalError):  # the data process is starting again
                if slots.gpu_bytes is not None:
                    found[device] = slots.gpu_bytes
        return found

    def of(self, devices: set[str]) -> list[DeviceSlots]:
        return [slots for device, slots in self._slots.items() if device in devices]

    def kinds_of(self, devices: set[str]) -> tuple[wire.MemoryKind, ...]:
        """Return the kinds of memory of the open slots."""
        return tuple(sorted({slots.memory_kind for slots in self.of(devices) if slots.is_open}))

    async def check(self) -> None:
        """Kill a restarted data process that cannot create the slots; another one will start."""
        for slots in list(self._slots.values()):  # a device may be added meanwhile
            try:
                await self._data.result(slots.defined)
            except TransferFailed:  # it has ended
                return
            except KVBusError as error:
                self._data.kill(f"no staging slots for {slots.device}: {error.message}")

    async def make(self, device: str) -> None:
        self.check_packs()
        async with self._lock:
            if device in self._slots:
                return
            wanted = wire.OpenSlots(
                device=device,
                num_slots=self.num_slots,
                slot_bytes=self.slot_bytes,
                nic_reads_gpu=self._on_gpu or await self._nic_reads(device),
            )
            slots = DeviceSlots(device, self.num_slots, self.slot_bytes, Defined(wanted))
            await self._data.define(slots.defined)
            self._slots[device] = slots
            if device != HOST:
                cost = {} if slots.gpu_bytes is None else {"gpu_bytes": slots.gpu_bytes}
                log.info("staging.placed", gpu=device, memory=slots.memory_kind, **cost)

    async def _nic_reads(self, device: str) -> bool:
        if device == HOST or not self._nic_reads_gpu:
            return False
        read = await self._measure_read(device)
        if read.error:
            log.warning("staging.unreadable", gpu=device, reason=read.error, do=LET_NICS_READ)
            return False
        write = log.warning if read.is_emulated else log.info
        advice = {"do": LET_NICS_READ} if read.is_emulated else {}
        event = "staging.emulated" if read.is_emulated else "staging.read"
        speed = round(read.bytes_per_s)
        write(event, gpu=device, wire=read.wire, bytes_per_s=speed, **advice)
        return not read.is_emulated
