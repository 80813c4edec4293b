"""Two agents in the test's process, and the memory that one maps of the other."""

import ctypes
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvbus.agent.config import convert_config
from kvbus.agent.runtime import Runtime
from kvbus.bus import new_context
from kvbus.engine import Fetch, Offer
from kvbus.protocol import AgentRole
from kvbus_decode import transfers
from kvbus_decode.config import DecodeConfig
from kvbus_decode.decode_service import DecodeService
from kvbus_prefill.prefill_service import PrefillService
from tests.support.agents import until
from tests.support.engines import Engine, engine, make_spec
from tests.support.inside_agents import BINDS, inside_agent
from tests.support.memories import Memory
from tests.unit.prefill.inside import PrefillAgent, given_back, prefill_agent

Extent = tuple[int, int]


@asynccontextmanager
async def decode_agent(folder: Path, **settings: Any) -> AsyncIterator[Runtime]:
    """A started agent; its attach socket is at ``config.attach_path``."""
    fields = {"agent_id": "decode", **BINDS, "runtime_dir": str(folder / "run"), **settings}
    config = convert_config(DecodeConfig, fields, source="the test")
    with new_context() as context:
        async with inside_agent(
            AgentRole.DECODE, config, lambda agent: DecodeService(agent, config), context
        ) as runtime:
            yield runtime


@dataclass
class Neighbours:
    """Two agents that can share memory."""

    prefill: PrefillAgent
    decode: Runtime

    def __post_init__(self) -> None:
        theirs, ours = self.prefill.runtime.service, self.decode.service
        assert isinstance(theirs, PrefillService)
        assert isinstance(ours, DecodeService)
        self.lender, self.routes, self.service = theirs.lender, ours.routes, ours

    @property
    def mapped(self) -> list[Any]:
        return [source.mapped for route in self.routes for source in route.sources]

    def the_memory(self) -> Any:
        (memory,) = self.mapped
        assert memory is not None
        return memory

    @property
    def state(self) -> str:
        (state,) = self.service.sharing().engines.values()
        return state

    @asynccontextmanager
    async def engines(
        self, *, tp: int = 1, memory: Memory | None = None
    ) -> AsyncIterator[tuple[Engine, Engine]]:
        """Engines that fit, until both agents have given their memory back."""
        theirs, ours = self.prefill.attach, self.decode.config.attach_path
        async with (
            engine(theirs, make_spec(tp=tp), seed=1, memory=memory) as source,
            engine(ours, make_spec(tp=tp), seed=2) as target,
        ):
            processes = self.processes()
            yield source, target
        await until(lambda: all(given_back(process) for process in processes))

    def processes(self) -> list[Any]:
        directories = self.prefill.runtime.agent.engines, self.decode.agent.engines
        engines = [one for directory in directories for one in directory.engines.values()]
        return [process for one in engines for process in one.processes]

    def forget_routes(self) -> None:
        for route in self.routes:
            route.close()
        gc.collect()


@asynccontextmanager
async def neighbours(
    folder: Path,
    *,
    prefill: dict[str, Any] | None = None,
    decode: Callable[[PrefillAgent], dict[str, Any]] | dict[str, Any] | None = None,
) -> AsyncIterator[Neighbours]:
    for name in "pd":
        (folder / name).mkdir(mode=0o700)
    async with prefill_agent(folder / "p", **(prefill or {})) as source:
        settings = decode(source) if callable(decode) else decode or {}
        async with decode_agent(folder / "d", **settings) as target:
            yield Neighbours(source, target)


async def begin(
    source: Engine, target: Engine, num_tokens: int, **options: Any
) -> tuple[Offer, Fetch]:
    theirs, ours = source.some_blocks(3, num_tokens), target.some_blocks(4, num_tokens)
    offer = await source.prefill.offer("r", num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(offer.ticket, num_tokens=num_tokens, block_ids=ours, **options)
    return offer, fetch


def before_each_copy(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Call ``act`` in the copying thread, before bytes move."""
    copy: Callable[[Any], None] = vars(transfers)["copy_runs"]

    def acting(runs: Any) -> None:
        act()
        copy(runs)

    monkeypatch.setattr(transfers, "copy_runs", acting)


def bytes_at(address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))


def bytes_of(memory: Any, source: Engine) -> bool:
    found = []
    for rank, theirs in source.memories().items():
        (address,) = memory.addresses[rank].values()
        found.append(np.array_equal(bytes_at(address, theirs.numel()), theirs.numpy()))
    return all(found)


def files_at(first: int, end: int) -> list[str]:
    """The files that are mapped between two addresses of this process, as the kernel lists them."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if start < end and first < stop and "/" in line:
            found.append(line)
    return found
