"""The NIXL backend of a pair of agents, and the memory kinds of their staging slots."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvbus.data import messages as wire
from kvbus.data.client import DataProcess
from kvbus.errors import ErrorCode, LocalError
from kvbus_decode.emulation import is_emulated
from kvbus_decode.nixl_peers import NixlMemory, NixlPeers
from tests.support.agents import until
from tests.support.data_process import Data, FlatMemory
from tests.support.engines import failure_of, works
from tests.support.nixl_plugins import TWIN, plugin_environment
from tests.unit.decode.neighbours import Neighbours, begin, decode_agent, neighbours

pytestmark = pytest.mark.anyio

APART = {"mapped": False}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in plugin_environment(tmp_path_factory.mktemp("plugins")).items():
            patch.setenv(name, value)
        yield


def backends(both: Neighbours) -> list[str | None]:
    read = (source.nixl for route in both.routes for source in route.sources)
    return [memory.backend if memory else None for memory in read]


async def restart(data: DataProcess) -> None:
    boot = data.boot
    os.kill(data.status().pid, signal.SIGKILL)
    await until(lambda: data.boot not in ("", boot))


@pytest.mark.usefixtures("plugins")
async def test_readers_first_shared_backend_is_used_also_after_restarts(folder: Path) -> None:
    theirs = {**APART, "nixl_backends": ["UCX", TWIN]}
    ours = {"path": "direct", "nixl_backends": [TWIN, "UCX"]}
    async with neighbours(folder, prefill=theirs, decode=ours) as both, both.engines() as engines:
        assert await works(*engines)
        assert backends(both) == [TWIN]
        assert both.prefill.runtime.agent.data.num_progress, "LIBFABRIC's readers connect by it"
        for agent in (both.prefill.runtime.agent, both.decode.agent):
            await restart(agent.data)
            assert await works(*engines)
            assert backends(both) == [TWIN]


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize("name", ["UCX", TWIN])
async def test_blocked_data_process_is_replaced_soon_without_ucx(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """UCX does not wait for peers in its calls."""
    monkeypatch.setattr("kvbus.agent.data_plane.CHECK_AGAIN_S", 0.02)
    monkeypatch.setattr("kvbus.agent.data_plane.BLOCKED_AFTER_S", 0.3)
    (folder / "d").mkdir(mode=0o700)
    async with decode_agent(folder / "d", path="direct", nixl_backends=[name]) as agent:
        data = agent.agent.data
        boot = data.boot
        os.kill(data.status().pid, signal.SIGSTOP)
        if name == "UCX":
            await until(lambda: agent.agent.data_plane.silent_s > 1.0)
            assert data.boot == boot
        else:
            await until(lambda: data.boot not in ("", boot))
            assert "had not answered" in data.last_end


@pytest.mark.usefixtures("plugins")
async def test_agents_without_common_backend_refuse_by_both_lists(folder: Path) -> None:
    theirs, ours = {**APART, "nixl_backends": ["UCX"]}, {"nixl_backends": [TWIN]}
    async with (
        neighbours(folder, prefill=theirs, decode=ours) as both,
        both.engines() as (source, target),
    ):
        offer, fetch = await begin(source, target, 32)
        failed = await failure_of(fetch)
        await offer.withdraw()
        await fetch.freed
    assert failed.code is ErrorCode.INCOMPATIBLE
    assert f"'decode' has {TWIN}, the prefill agent 'prefill' has UCX" in failed.message


@pytest.mark.usefixtures("plugins")
async def test_mapped_memory_needs_no_common_backend(folder: Path) -> None:
    async with (
        neighbours(folder, decode={"nixl_backends": [TWIN]}) as both,
        both.engines() as engines,
    ):
        assert await works(*engines)
        assert backends(both) == [None]


async def test_backend_that_was_not_offered_is_not_read_with(folder: Path) -> None:
    (folder / "d").mkdir(mode=0o700)
    holder, flat = Data("peer/0000"), FlatMemory.of(4, 4096)
    try:
        async with decode_agent(folder / "d", path="direct") as agent:
            holder.call(wire.OpenNixl())
            held = holder.hold(1, flat)
            peers = NixlPeers(agent.agent.data)
            for backend, told in (("TWIN", "was not offered"), ("UCX", "came as that of")):
                name = "peer/0000" if backend == "TWIN" else "another"
                memory = NixlMemory(name, held.metadata, frozenset(), backend)
                with pytest.raises(LocalError, match=told):
                    await peers.add(memory, ("tcp://10.0.0.1:1",), lambda _: set())
    finally:
        holder.end()
        flat.segment.close()


@pytest.mark.parametrize(
    ("ours", "theirs", "on_one_machine", "has_rdma", "expected"),
    [
        ("D", "D", True, False, False),
        ("V", "V", True, False, False),
        ("V", "D", True, True, True),
        ("D", "V", True, False, True),
        ("D", "DV", True, False, True),
        ("V", "", True, False, False),
        ("", "V", False, False, False),
        ("D", "D", False, False, False),
        ("V", "V", False, False, True),
        ("D", "V", False, False, True),
        ("V", "D", False, True, False),
    ],
)
def test_reads_that_ucx_emulates(
    ours: str, theirs: str, on_one_machine: bool, has_rdma: bool, expected: bool
) -> None:
    kinds: Any = {"D": "DRAM", "V": "VRAM"}
    found = is_emulated(
        [kinds[one] for one in ours],
        [kinds[one] for one in theirs],
        on_one_machine=on_one_machine,
        has_rdma=has_rdma,
    )
    assert found == expected


@pytest.mark.parametrize("kind", ["VRAM", "DRAM"])
async def test_slots_of_unlike_memory_are_one_warning_and_a_fault(folder: Path, kind: str) -> None:
    """Prefill slots in VRAM are only claimed here: the handshake is real."""
    async with (
        neighbours(folder, prefill=APART, decode={"path": "packed"}) as both,
        both.engines() as engines,
    ):
        vars(both.prefill.runtime.agent.staging)["kinds_of"] = lambda _: (kind,)
        with capture_logs() as lines:
            assert await works(*engines)
            both.forget_routes()
            assert await works(*engines)
        live = await asyncio.wrap_future(both.decode.report.live())
    warned = [line for line in lines if line["event"] == "read.emulated"]
    found = [one for one in live.status.faults if "emulates" in one.what]
    assert len(warned) == len(found) == (kind == "VRAM")
    for line, fault in zip(warned, found, strict=True):
        assert (line["log_level"], line["reason"], line["do"]) == ("warning", fault.what, fault.do)
        assert "the staging slots there are in VRAM, those here in DRAM" in fault.what
        assert 'gpu_slots = "host"' in fault.do
