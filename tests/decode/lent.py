"""Two agents in the test's process, and what of the prefill engine the decode agent maps."""

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbus.agent.engines.local_engine import EngineProcess
from kvbus.agent.process.runtime import Runtime
from kvbus.engine import DecodeSession, PrefillSession
from kvbus_decode.agent import DecodeService
from kvbus_decode.peer.handshake import RouteBook
from kvbus_decode.peer.mapped_memory import MappedMemory
from kvbus_decode.peer.route import Route
from kvbus_prefill.lending import MemoryLender
from tests.agents import until
from tests.decode.inside import decode_agent
from tests.engines import Engine, engine, make_spec
from tests.memories import Memory
from tests.prefill.inside import PrefillAgent, given_back, prefill_agent


@dataclass
class Neighbours:
    """Two agents that can share memory."""

    prefill: PrefillAgent
    decode: Runtime

    @property
    def routes(self) -> RouteBook:
        """The routes of the decode agent."""
        service = self.decode.service
        assert isinstance(service, DecodeService)
        return service._leases.routes

    @property
    def lender(self) -> MemoryLender:
        """The memory socket of the prefill agent."""
        return self.prefill.runtime.service._lender  # type: ignore[attr-defined]  # a PrefillService

    @property
    def all_routes(self) -> list[Route]:
        """What the decode agent has met."""
        return list(self.routes._routes.values())

    @property
    def mapped(self) -> list[MappedMemory | None]:
        """What each source of each route has."""
        return [source.mapped for route in self.all_routes for source in route.sources]

    def the_memory(self) -> MappedMemory:
        """That of the only source of the only route."""
        (memory,) = self.mapped
        assert memory is not None
        return memory

    @asynccontextmanager
    async def engines(
        self, *, tp: int = 1, memory: Memory | None = None
    ) -> AsyncIterator[tuple[Engine, Engine]]:
        """Engines that fit, until both agents have given their memory back."""
        theirs, ours = self.prefill.attach, self.decode.config.attach_path
        async with (
            engine(PrefillSession, theirs, make_spec(tp=tp), seed=1, memory=memory) as source,
            engine(DecodeSession, ours, make_spec(tp=tp), seed=2) as target,
        ):
            processes = self.processes()
            yield source, target
        await until(lambda: all(given_back(process) for process in processes))

    def processes(self) -> list[EngineProcess]:
        """Those of all engines of both agents."""
        directories = self.prefill.runtime.agent.engines, self.decode.agent.engines
        engines = [one for directory in directories for one in directory.engines.values()]
        return [process for one in engines for process in one.processes]

    def forget_routes(self) -> None:
        """As if their engine was gone."""
        self.routes._routes = {}
        gc.collect()

    @property
    def state(self) -> str:
        """What the decode agent says of the only engine that it has met."""
        (state,) = self.routes.borrower.states.values()
        return state


@asynccontextmanager
async def neighbours(
    folder: Path, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None
) -> AsyncIterator[Neighbours]:
    """Both agents, started."""
    (folder / "p").mkdir(mode=0o700)
    (folder / "d").mkdir(mode=0o700)
    async with (
        prefill_agent(folder / "p", **(prefill or {})) as source,
        decode_agent(folder / "d", **(decode or {})) as target,
    ):
        yield Neighbours(source, target)


def bytes_at(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    """What is mapped there now."""
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * num_bytes).from_address(address))


def bytes_of(memory: MappedMemory, source: Engine) -> bool:
    """Whether what is mapped is, byte by byte, the memory of the engine."""
    found = []
    for rank, theirs in source.memories().items():
        (address,) = memory.addresses[rank].values()
        found.append(np.array_equal(bytes_at(address, theirs.numel()), theirs.numpy()))
    return all(found)


def files_at(first: int, end: int) -> list[str]:
    """The files that are mapped between two addresses of this process, as the kernel lists them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    bounds = [[int(part, 16) for part in line.split()[0].split("-")] for line in lines]
    inside = [start < end and first < stop for start, stop in bounds]
    return [
        line for line, is_inside in zip(lines, inside, strict=True) if is_inside and "/" in line
    ]
