"""The devices that KV memory is on, and the staging slots beside each of them."""

import anyio

from kvbus.agent.process.config import AgentConfig
from kvbus.agent.staging.gpu import open_gpu_slots
from kvbus.agent.staging.slot_memory import SlotMemory
from kvbus.errors import ConfigError, ErrorCode, LocalError
from kvbus.transport import Registration, Transport

HOST = "host"
"""All memory that is not a GPU's; GPUs are known by their UUIDs."""


class StagingDevices:
    """The slots of an agent, device by device: the host's from the start, a GPU's once it is used.

    All have ``num_slots`` slots of ``slot_bytes``; both are 0 when packing is turned off. With
    ``only`` they are all that NIXL is told of: the engines' own memory is not registered.
    """

    def __init__(
        self, transport: Transport, *, num_slots: int, slot_bytes: int, only: bool = False
    ) -> None:
        self.only = only
        self.num_slots, self.slot_bytes = num_slots, slot_bytes if num_slots else 0
        self._transport = transport
        self._slots: dict[str, SlotMemory] = {}
        self._lock = anyio.Lock()

    @classmethod
    async def open(cls, config: AgentConfig, transport: Transport) -> "StagingDevices":
        """What the configuration asks for, with the host's slots made and registered.

        Raises `SegmentError`.
        """
        num_slots = config.staging_bytes // config.slot_bytes
        devices = cls(
            transport,
            num_slots=num_slots,
            slot_bytes=config.slot_bytes,
            only=config.exposure == "staging",
        )
        if num_slots:
            devices._slots[HOST] = await SlotMemory.open(
                transport, num_slots=num_slots, slot_bytes=config.slot_bytes
            )
        return devices

    @property
    def packs(self) -> bool:
        """Whether there are slots at all."""
        return self.num_slots > 0

    def check_packs(self) -> None:
        """Raise `ConfigError` when the configuration turned packing off."""
        if not self.packs:
            raise ConfigError(
                "this agent packs nothing: key 'staging_bytes' of its configuration is 0",
                key="staging_bytes",
            )

    def at(self, device: str) -> SlotMemory:
        """The slots of a device; raises `LocalError` when it has none."""
        slots = self._slots.get(device)
        if slots is None:
            self.check_packs()
            raise LocalError(f"no staging slots for {device}", code=ErrorCode.INTERNAL)
        return slots

    def registrations(self, devices: set[str]) -> list[Registration]:
        """What peers have to know of to read slots of these devices; nothing without slots."""
        return [slots.registration for name, slots in self._slots.items() if name in devices]

    async def make(self, gpu: str) -> None:
        """Have slots for a GPU that this process sees, made by the first who asks.

        Takes a second or so, as it measures. Raises `SegmentError`, `ConfigError`.
        """
        self.check_packs()
        async with self._lock:
            if gpu not in self._slots:
                self._slots[gpu] = await open_gpu_slots(
                    self._transport, gpu, num_slots=self.num_slots, slot_bytes=self.slot_bytes
                )

    async def close(self) -> None:
        """Deregister and give back all; nothing may copy into it or out of it any more."""
        for device in list(self._slots):
            await self._slots.pop(device).close()

    def unmap(self) -> None:
        """Give all back once the transport, closed without handles left, let go of it."""
        for slots in self._slots.values():
            slots.unmap()
