"""One run of the demo: processes up, requests served, leaks counted, outputs compared.

Refuses to be interrupted half way: a signal ends the run, but never the clean-up after it.
"""

import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import anyio

from kvbus.demo.options import DemoOptions
from kvbus.demo.outcome import DemoReport
from kvbus.demo.processes import running_processes
from kvbus.demo.router import Router
from kvbus.demo.step import Step
from kvbus.errors import KVBusError

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

OnProgress = Callable[[str, int, int], None]


async def run_demo(
    options: DemoOptions, folder: Path, on_progress: OnProgress
) -> DemoReport | signal.Signals:
    """The report, or the signal that ended the run.

    ``on_progress`` is told what is done now, how much of it is done, and how much there is.
    Raises a group of `KVBusError`: a `PeerLost` for a process that ended early, for one.
    """
    outcome: DemoReport | signal.Signals | None = None
    with anyio.open_signal_receiver(*ENDING_SIGNALS) as signals:
        async with anyio.create_task_group() as tasks:

            async def end_on_signal(signals: AsyncIterator[signal.Signals]) -> None:
                nonlocal outcome
                outcome = await anext(signals)
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_on_signal, aiter(signals))
            outcome = await _run(options, folder, on_progress)
            tasks.cancel_scope.cancel()
    if outcome is None:
        raise KVBusError("the run ended without an outcome")
    return outcome


async def _run(options: DemoOptions, folder: Path, on_progress: OnProgress) -> DemoReport:
    async with running_processes(options, folder) as processes:
        on_progress("starting two agents and two engines", 0, 0)
        await processes.prefill.ready()
        await processes.decode.ready()
        num_served = 0

        def on_served() -> None:
            nonlocal num_served
            num_served += 1
            on_progress("handing off", num_served, options.num_requests)

        on_progress("handing off", 0, options.num_requests)
        router = Router(options, processes)
        served = await router.serve_all(on_served)
        leaks = await router.count_leaks()
        completed = {one.prompt for one in served if one.decoded is not None}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(processes.finish)
            alone = await _run_alone(options, completed, on_progress)
    return DemoReport(options, served, alone, leaks)


async def _run_alone(
    options: DemoOptions, prompts: set[str], on_progress: OnProgress
) -> Mapping[str, list[Step]]:
    """What the model generates without a handoff, in this process, by prompt."""
    alone: dict[str, list[Step]] = {}
    if not prompts:
        return alone
    on_progress("running the model alone", 0, len(prompts))
    generate = await anyio.to_thread.run_sync(_load_model, options)
    for prompt in sorted(prompts):
        alone[prompt] = await anyio.to_thread.run_sync(generate, prompt)
        on_progress("running the model alone", len(alone), len(prompts))
    return alone


def _load_model(options: DemoOptions) -> Callable[[str], list[Step]]:
    """The reference. Loading torch takes a second, which would delay the start of the processes."""
    from kvbus.demo.generate import encode, generate_alone  # noqa: PLC0415 - see above
    from kvbus.demo.model import Transformer  # noqa: PLC0415 - see above
    from kvbus.demo.model_config import ModelConfig  # noqa: PLC0415 - see above

    model = Transformer(ModelConfig.of(options.model))
    return lambda prompt: generate_alone(
        model, encode(prompt), options.max_new_tokens, tokens_per_pass=options.prefill_chunk
    )
