"""Real NIXL and UCX on the fake driver: agents of two processes read VRAM of each other."""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.cuda import World
from tests.support.cuda.apart import WITHIN_S, Beside, apart
from tests.support.cuda.calls import Cuda

SIZE = 1 << 20
CONTENT = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()


def owner(cuda: Cuda, other: Beside) -> None:
    cuda.start()
    agent, registered, at = agent_with_vram(cuda, "owner")
    cuda.write(at, CONTENT)
    other.send(agent.metadata([registered], "UCX"), at)
    while not other.has_ended():
        agent.progress()


@apart(owner, only_fake=True)  # UCX chooses CUDA IPC by the defaults that the product sets
def test_nixl_reads_vram_of_another_process_over_cuda_ipc(cuda: Cuda, other: Beside) -> None:
    from kvbus.data.metadata import read_metadata

    cuda.start()
    agent, _, at = agent_with_vram(cuda, "reader")
    metadata, remote_at = other.receive()
    before = num_copies()
    agent.add_peer(read_metadata(metadata))
    handle = agent.prepare("owner", rows(at), rows(remote_at), ("VRAM", "VRAM"))
    deadline = time.monotonic() + WITHIN_S
    is_done = agent.post(handle, "owner")
    while not is_done:
        assert time.monotonic() < deadline
        is_done = agent.is_done(handle, "owner")

    assert num_copies() == before + 1, "UCX went another way"
    assert cuda.read(at, SIZE) == CONTENT


def agent_with_vram(cuda: Cuda, name: str) -> tuple[Any, Any, int]:
    os.environ["UCX_NET_DEVICES"] = "lo"
    from kvbus.data import nixl_agent
    from kvbus.data.nixl import Registration

    agent = nixl_agent.load()(name)
    at = cuda.alloc(SIZE)
    registered = Registration(at, SIZE, 0, "VRAM")
    agent.register(registered)
    return agent, registered, at


def rows(at: int) -> npt.NDArray[np.uint64]:
    return np.array([[at, SIZE, 0]], np.uint64)


def num_copies() -> int:
    return World(Path(os.environ["FAKE_CUDA_WORLD"])).num("copies")
