"""Measures what a step of vLLM pays for KvbusConnector while requests are in flight.

Run it from the repository's root, in an environment that has vLLM: ``python
benchmarks/vllm_step.py``. Two agents, and the connector's sides as vLLM drives them, without a
model: on the prefill side are offers that wait for a reader, on the decode side loads that wait for
a prefill agent, which is stopped meanwhile. A step is what the scheduler asks for, its way to a
worker by pickle, and what it does with the worker's answer. The threads of the connector's sessions
run beside it, as in an engine.
"""

import argparse
import gc
import logging
import os
import pickle
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvbus.bench.pairs import agent
from kvbus.engine import Link, RankMemory
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout
from kvbus.integrations.vllm.params import ConnectorOptions, StepDone
from kvbus.integrations.vllm.scheduler import SchedulerSide

GROUP = GroupSpec("full", (0, 1), 32, 2, 64, "float32")
NUM_BLOCKS = 512
PROMPT = list(range(100, 164))
UP_WITHIN_S = 30.0
SPEC = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=64, dtype=torch.float32)
CACHES = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["0", "1"], SPEC)])
NOTHING_SCHEDULED = SchedulerOutput.make_empty()


@contextmanager
def scheduler(attach: Path, name: str) -> Iterator[SchedulerSide]:
    """One engine's scheduler side, its memory registered."""
    spec = EngineSpec(name, "model", 1, (GROUP,))
    memory = RankMemory.allocate(spec, 0, KvLayout.parse("HND"), num_blocks=NUM_BLOCKS)
    pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=GROUP.block_size)
    side = SchedulerSide(
        ConnectorOptions(str(attach)), spec, CACHES, kv_role="kv_both", drains=False
    )
    with closing(memory), Link(attach, spec, memory=memory, control=False, attach_timeout_s=30.0):
        side.bind_kv_cache_manager(SimpleNamespace(block_pool=pool))
        side.set_xfer_handshake_metadata_pp_aware({})
        try:
            if not side._control_links[0].wait_open(UP_WITHIN_S):
                raise SystemExit(f"error: the agent at {attach} did not take the engine")
            yield side
        finally:
            side.shutdown()


def blocks_of(number: int) -> KVCacheBlocks:
    """The two blocks of a request."""
    return KVCacheBlocks(([KVCacheBlock(2 * number + 1), KVCacheBlock(2 * number + 2)],))


def request(request_id: str, params: dict[str, Any]) -> Request:
    """As vLLM's scheduler has it."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(request_id, list(PROMPT), sampling, None)


def offered(side: SchedulerSide, number: int) -> dict[str, Any]:
    """A request whose KV waits for a reader: the params of its decode request."""
    wanted = request(f"offer-{number}", {"do_remote_decode": True})
    blocks = blocks_of(number)
    side.on_new_request(wanted)
    side.update_state_after_alloc(wanted, blocks, 0)
    wanted.num_computed_tokens = len(PROMPT)
    wanted.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = side.request_finished_all_groups(wanted, blocks.get_block_ids())
    if params is None:
        raise SystemExit("error: the prefill agent gave no ticket")
    return params


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def load(side: SchedulerSide, number: int, params: dict[str, Any]) -> None:
    """A load that waits for its KV."""
    wanted = request(f"load-{number}", params)
    side.on_new_request(wanted)
    num_tokens, _ = side.get_num_new_matched_tokens(wanted, 0)
    side.update_state_after_alloc(wanted, blocks_of(number), num_tokens or 0)


def steps_us(side: SchedulerSide, num_steps: int) -> list[float]:
    """Microseconds of each step."""
    times = []
    for _ in range(num_steps):
        start = time.perf_counter_ns()
        told = pickle.loads(pickle.dumps(side.build_connector_meta(NOTHING_SCHEDULED)))  # noqa: S301 - of this process
        if told.step:
            done = KVConnectorOutput(kv_connector_worker_meta=StepDone(told.step))
            side.update_connector_output(done)
        times.append((time.perf_counter_ns() - start) / 1e3)
    return times


def measure(label: str, side: SchedulerSide, num_steps: int) -> None:
    """Print what its steps take."""
    times = sorted(steps_us(side, num_steps))
    print(
        f"{label}: p10 {times[len(times) // 10]:.1f} us, p50 {statistics.median(times):.1f} us, "
        f"p99 {times[len(times) * 99 // 100]:.1f} us, max {times[-1]:.0f} us"
    )


def main() -> None:
    """Measure, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--requests", type=int, default=64, help="in flight on each side")
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvs-") as name:
        folder = Path(name)
        with (
            agent("prefill", folder) as offering,
            agent("decode", folder) as reading,
            scheduler(offering.attach_path, "p") as prefill,
            scheduler(reading.attach_path, "d") as decode,
        ):
            params = [offered(prefill, number) for number in range(options.requests)]
            gc.freeze()
            measure(f"{options.requests} offers", prefill, options.steps)
            with stopped(offering.child.pid):
                for number, one in enumerate(params):
                    load(decode, number, one)
                measure(f"{options.requests} loads", decode, options.steps)
                logging.disable()  # these loads fail, as the session ends before they do


if __name__ == "__main__":
    main()
