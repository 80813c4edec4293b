"""One run of the demo: processes up, requests served, leaks counted, outputs compared.

Refuses to lose what it has: whatever ends a run, its report says what came of it until then. A
signal ends the run, but never the clean-up after it.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio

from kvbus.demo.messages import Step
from kvbus.demo.options import DemoOptions
from kvbus.demo.processes import running_processes
from kvbus.demo.prompts import encode
from kvbus.demo.report import DemoReport
from kvbus.demo.router import Router
from kvbus.errors import KVBusError, leaves

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_FOLDER_BYTES = 80  # of the 107 that Linux allows; the rest is for the agents' sockets
PREFIX = "kvbus-demo-"

OnProgress = Callable[[str, int, int], None]
"""Is told what is done now, how much of it is done, and how much there is."""


async def run_demo(options: DemoOptions, on_progress: OnProgress) -> DemoReport:
    """The report of a run, or of as much of one as there was."""
    report = DemoReport(options)
    with anyio.open_signal_receiver(*ENDING_SIGNALS) as signals, _private_folder() as folder:
        async with anyio.create_task_group() as tasks:

            async def end_on_signal() -> None:
                report.ended_by = await anext(aiter(signals))
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_on_signal)
            with _noted(report):
                await _serve(report, folder, on_progress)
            await _compare(report, on_progress)
            tasks.cancel_scope.cancel()
    return report


async def _serve(report: DemoReport, folder: Path, on_progress: OnProgress) -> None:
    """All requests; the outputs are compared while the processes end."""
    num_requests = report.options.requests
    on_progress("starting two agents and two engines", 0, 0)
    async with running_processes(report.options, folder) as processes:
        async with processes.watched():
            router = Router(report, processes)
            await router.wait_ready()
            on_progress("handing off", 0, num_requests)
            await router.serve_all(lambda ended: on_progress("handing off", ended, num_requests))
            await router.count_leaks()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_compare, report, on_progress)
            with _noted(report):
                await processes.finish()


async def _compare(report: DemoReport, on_progress: OnProgress) -> None:
    """What the model generates without a handoff, in this process."""
    prompts = sorted(report.not_compared)
    if not prompts:
        return
    on_progress("running the model alone", 0, len(prompts))
    generate = await anyio.to_thread.run_sync(_load_model, report.options)
    for number, prompt in enumerate(prompts, start=1):
        report.alone[prompt] = await anyio.to_thread.run_sync(generate, prompt)
        on_progress("running the model alone", number, len(prompts))


def _load_model(options: DemoOptions) -> Callable[[str], list[Step]]:
    """The reference. Loading torch takes a second, which would delay the start of the processes."""
    from kvbus.demo.model import Transformer, generate_alone  # noqa: PLC0415 - see above

    model = Transformer(options.model)
    return lambda prompt: generate_alone(
        model, encode(prompt), options.max_new_tokens, tokens_per_pass=options.prefill_chunk
    )


@contextmanager
def _noted(report: DemoReport) -> Iterator[None]:
    """What goes wrong in the block is the report's trouble."""
    try:
        yield
    except* KVBusError as errors:
        report.trouble += [error.message for error in leaves(errors)]


@contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder of mode 0700 for configurations, sockets, and logs that nobody asked to keep.

    It goes with the ``with`` block. In /tmp when TMPDIR is too long for the path of a Unix socket.
    """
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) + len(PREFIX) > MAX_FOLDER_BYTES - 10:
        parent = "/tmp"  # noqa: S108 - made 0700, with a name that nobody else has
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent) as folder:
        yield Path(folder)
