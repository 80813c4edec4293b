"""Objects that requests name, and the requests that wait for them."""

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, KVBusError, LocalError

Name = tuple[Hashable, ...]
NIXL: Name = ("nixl",)


def memory(number: int) -> Name:
    return "memory", number


def plan(number: int) -> Name:
    return "plan", number


def peer(name: str) -> Name:
    return "peer", name


def slots(device: str) -> Name:
    return "slots", device


NAMES: dict[type[Any], Callable[[Any], Iterable[Name]]] = {
    wire.OpenNixl: lambda _: (NIXL,),
    wire.OpenSlots: lambda request: (slots(request.device),),
    wire.AddMemory: lambda request: (memory(request.memory),),
    wire.AddRemote: lambda request: (memory(request.memory),),
    wire.DiscardMemory: lambda request: (memory(request.memory),),
    wire.RemoveMemory: lambda request: (memory(request.memory),),
    wire.AddPeer: lambda request: (NIXL, peer(request.peer)),
    wire.RemovePeer: lambda request: (NIXL, peer(request.peer)),
    wire.AddPlan: lambda request: (
        plan(request.plan),
        *map(memory, request.sources.values()),
        *map(memory, request.targets.values()),
    ),
    wire.RemovePlan: lambda request: (plan(request.plan),),
    wire.Metadata: lambda request: (
        NIXL,
        *map(memory, request.memories),
        *map(slots, request.devices),
    ),
    wire.Read: lambda request: (plan(request.plan), NIXL),
    wire.ReadStaged: lambda request: (plan(request.plan), NIXL, slots(request.device)),
    wire.ReadTile: lambda request: (NIXL, peer(request.peer), slots(request.device)),
    wire.Copy: lambda request: (plan(request.plan),),
    wire.CopyStaged: lambda request: (plan(request.plan), slots(request.device)),
    wire.Scatter: lambda request: (*map(memory, request.memories), slots(request.device)),
    wire.GatherJob: lambda request: (memory(request.memory), slots(request.device)),
    wire.Zero: lambda request: (memory(request.memory),),
    wire.Wipe: lambda request: (slots(request.device),),
    wire.DigestJob: lambda request: (memory(request.memory),),
}
"""In the order in which requests wait for them."""


MAKES: dict[type[Any], Callable[[Any], Name]] = {
    wire.AddPeer: lambda request: peer(request.peer),
    wire.AddPlan: lambda request: plan(request.plan),
}


@dataclass(slots=True, eq=False)
class Definition:
    """All requests but its ``maker`` wait while it ``is_pending``."""

    is_pending: bool = True
    value: Any = None
    error: KVBusError | None = None
    maker: wire.ToData | None = None
    waiting: list[tuple[wire.ToData, list[int]]] = field(default_factory=list)


# Requests that wait for an object start in order of arrival. Each waits for one object at a time:
#
#     AddMemory 1 ─▶ thread: map ──────▶ register, reply ─▶ AddPlan 2 ─▶ thread ...
#     AddPlan 2      waits for memory 1 ───────────────────┘
#     Read 3         waits for plan 2 ───────────────────────────────────▶ ...
class Definitions:
    def __init__(self, begin: Callable[[wire.ToData, list[int]], None]) -> None:
        self._begin = begin
        self._known: dict[Name, Definition] = {}

    def values(self) -> Iterator[Any]:
        return (one.value for one in self._known.values())

    def get(self, name: Name) -> Definition | None:
        return self._known.get(name)

    def find(self, name: Name) -> Any:
        definition = self._known.get(name)
        if definition is None:
            raise LocalError(f"{_text_of(name)} is not defined", code=ErrorCode.INTERNAL)
        if definition.error is not None:
            raise definition.error
        return definition.value

    def check_new(self, name: Name) -> None:
        definition = self._known.get(name)
        if definition is not None and definition.value is not None:
            raise LocalError(f"{_text_of(name)} is defined already", code=ErrorCode.INTERNAL)

    def waits(self, message: wire.ToData, fds: list[int]) -> bool:
        for name in self._names(message):
            definition = self._known.get(name)
            if definition is None or not definition.is_pending or definition.maker is message:
                continue
            definition.waiting.append((message, fds))
            make = MAKES.get(type(message))
            if make is not None:
                self._expect(make(message), message)
            return True
        return False

    def _expect(self, name: Name, maker: wire.ToData) -> None:
        definition = self._known.setdefault(name, Definition(is_pending=False))
        if not definition.is_pending:
            definition.is_pending, definition.maker = True, maker

    def withdraw(self, maker: wire.ToData) -> None:
        make = MAKES.get(type(maker))
        definition = self._known.get(make(maker)) if make is not None else None
        if make is None or definition is None or definition.maker is not maker:
            return
        if definition.value is None and definition.error is None:
            del self._known[make(maker)]
        self._resume(definition)

    def pend(self, name: Name) -> Definition:
        definition = self._known.setdefault(name, Definition())
        definition.is_pending = True
        return definition

    def settle(self, name: Name, value: Any) -> None:
        definition = self.pend(name)
        definition.value, definition.error = value, None
        self._resume(definition)

    def fail(self, name: Name, error: KVBusError) -> None:
        """Fail requests that name the object, now and later."""
        definition = self.pend(name)
        definition.value, definition.error = None, error.without_frames()
        self._resume(definition)

    def remove(self, name: Name) -> None:
        definition = self._known.pop(name, None)
        if definition is not None:
            self._resume(definition)

    def _resume(self, definition: Definition) -> None:
        definition.is_pending, definition.maker = False, None
        waiting, definition.waiting = definition.waiting, []
        for message, fds in waiting:
            self._begin(message, fds)

    def _names(self, message: wire.ToData) -> Iterator[Name]:
        names = NAMES.get(type(message))
        yield from names(message) if names is not None else ()
        if isinstance(message, wire.Read | wire.ReadStaged):
            definition = self._known.get(plan(message.plan))
            if definition is not None and definition.value is not None:
                yield peer(definition.value.peer)


def _text_of(name: Name) -> str:
    return " ".join(map(str, name))
