"""Two processes that do what may hang or crash: a target has memory, a reader reads it.

    doctor ──lend──▶ target ──▶ where its memory is ──read──▶ reader ──▶ what it found

None outlives `run_pair`: one that does not end in time is killed.
"""

import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import anyio
import msgspec

from kvbus.errors import KVBusError, LocalError, leaves
from kvbus.lab.process import Question, engine_process, run_program, serve

MAX_REASON_LETTERS = 300
_UCX_ERROR = re.compile(r"UCX\s+ERROR\s+(.+)")
_NIXL_ERROR = re.compile(r"^E\d{4} \S+\s+\d+ \S+?:\d+\] (.+)", re.MULTILINE)
_NUM_SHARED, _MARK = 1 << 20, 42

T = TypeVar("T")


class GpuMemory(msgspec.Struct, frozen=True):
    """Memory of a GPU that another process can open, and the GPUs that torch sees."""

    cuda_version: str
    gpus: tuple[tuple[str, str, int], ...]
    """UUID, name and bytes."""
    device: str
    handle: bytes
    offset_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Ended(Generic[T]):
    """What a pair logged, and its answer, or why there is none."""

    log: str
    answer: T | None = None
    failure: str = ""


def run_pair(kind: str, answer: type[T], limit_s: float, env: Mapping[str, str]) -> Ended[T]:
    """Have one process read what another one has; ``kind`` is ``nixl`` or ``cuda``."""
    answers, failure = list[T](), ""
    with tempfile.TemporaryDirectory(prefix="kvbus-doctor-") as folder:
        log = Path(folder) / "log"
        try:
            answers.append(anyio.run(_read, kind, answer, limit_s, env, log))
        except* KVBusError as errors:
            failure = _why(leaves(errors)[0], log.read_text(errors="replace"))
        except* TimeoutError:
            failure = f"no answer within {limit_s:.3g} s; --timeout gives more"
        text = log.read_text(errors="replace")
    return Ended(text, failure=failure) if failure else Ended(text, answers[0])


async def _read(kind: str, answer: type[T], limit_s: float, env: Mapping[str, str], log: Path) -> T:
    start = partial(engine_process, log=log, env=env)
    with anyio.fail_after(limit_s):
        async with (
            start(f"{kind} target", __name__, kind, "target") as target,
            start(f"{kind} reader", __name__, kind, "reader") as reader,
        ):
            lent = await target.ask(dict[str, Any], "lend")
            return await reader.ask(answer, "read", **lent)


def _why(error: KVBusError, log: str) -> str:
    """How it ended, and the first error that UCX told, or else NIXL, or else its last line."""
    head, _, tail = error.message.partition("; the last lines of its log:")
    reasons = [found[1] for one in (_UCX_ERROR, _NIXL_ERROR) if (found := one.search(log))]
    reasons += tail.splitlines()[-1:]
    return ": ".join([head, *reasons[:1]])[:MAX_REASON_LETTERS].replace("\n", " ")


# What a probe does. What may crash is imported by the probe alone.


async def _answer(question: Question) -> object:
    probe = {"nixl": _nixl, "cuda": _cuda}[sys.argv[1]]
    try:
        return probe(question)
    except (OSError, RuntimeError, AssertionError, ImportError) as error:  # torch asserts CUDA
        raise LocalError(" ".join(str(error).split())) from error


def _nixl(question: Question) -> object:
    from kvbus.lab import bare_pair  # noqa: PLC0415
    from kvbus.transport.nixl_agent import load_backend  # noqa: PLC0415

    load_backend()
    size_bytes = bare_pair.NUM_PLACES * bare_pair.LONG_BYTES
    agent = bare_pair.BareAgent(f"kvbus-doctor-{question.do}", size_bytes)
    if question.do == "read":
        agent.connect(msgspec.convert(question.given, bare_pair.MemoryLocation))
        return agent.bytes_per_s()
    return agent.lend()


def _cuda(question: Question) -> object:
    from kvbus.memory import cuda  # noqa: PLC0415 - torch

    if question.do == "lend":
        version, gpus = cuda.seen_gpus()
        memory = cuda.allocate_cuda(_NUM_SHARED, "cuda:0")
        memory.tensor.fill_(_MARK)[0].item()  # waits for the GPU
        place = memory.device, memory.handle, memory.offset_bytes, memory.size_bytes
        _KEPT.append(memory)
        return GpuMemory(version, tuple(gpus), *place)
    lent = msgspec.convert(question.given, GpuMemory)
    with cuda.CudaMapping(
        lent.device, lent.handle, offset_bytes=lent.offset_bytes, size_bytes=lent.size_bytes
    ) as mapping:
        if not (mapping.view()[:_NUM_SHARED] == _MARK).all():
            raise LocalError("it read other bytes than the target has")
    return lent


_KEPT: list[object] = []
"""Memory that is lent to another process."""

if __name__ == "__main__":
    run_program(partial(serve, _answer))
    os._exit(0)  # what is left of NIXL may hang in its destructors
