"""The command ``kvbus demo``: processes up, requests served, leaks counted, outputs compared.

Whatever ends a run, its report says what came of it until then. A signal ends the run, but never
the clean-up after it.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec
import typer

from kvbus.bus import ask_agent
from kvbus.console import Console
from kvbus.demo.messages import Computed, EngineSetup, Step
from kvbus.demo.options import DemoOptions
from kvbus.demo.prompts import encode
from kvbus.demo.report import DemoReport, Served, print_report
from kvbus.errors import ConfigError, KVBusError, RequestRefused, leaves
from kvbus.geometry import num_blocks_for
from kvbus.lab.process import (
    EngineChild,
    Settings,
    Taken,
    ToolKeys,
    agent_process,
    engine_process,
)
from kvbus.options import with_options
from kvbus.output import waiting_for, write_json
from kvbus.protocol.status import Status

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_FOLDER_BYTES = 80  # of the 107 that Linux allows; the rest is for the agents' sockets
PREFIX = "kvbus-demo-"
# The deadlines of the agents; on a busy machine the defaults are too short.
AGENT_SETTINGS: dict[str, Settings] = {
    "prefill": {"drain_timeout_s": 2.0, "offer_ttl_s": 600.0},
    "decode": {
        "drain_timeout_s": 2.0,
        "fetch_timeout_s": 600.0,
        "request_timeout_s": 60.0,
        "lease_s": 30.0,
    },
}
ASK_TIMEOUT_S = 60.0

OnProgress = Callable[[str], None]
"""Is told what the run does now."""


@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Hand requests from a prefill engine to a decode engine; compare with the model run alone.

    A SPEC is what an engine has of its own, such as `tp=2 layout=HND block=48`, with spaces or
    commas.

    * `tp`, `pp`: ranks that share the KV heads, stages that share the 4 layers (1)
    * `layout`: order of the axes within a block, `NHD` or `HND` (NHD); `cross_layer=true` puts
      all layers into one region
    * `block`: tokens in a block (16)
    * `ring`: a cache that no agent can map, copied through a ring of host blocks that holds such
      a part of it, as `0.5` (none)

    Exit status 0: all outputs are equal, tokens and logits, and every block came back.
    """
    if options.keep_logs is not None:
        try:
            options.keep_logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {options.keep_logs}: {error.strerror}"
            ) from error
    with waiting_for("the demo") as wait_for:
        report = anyio.run(run_demo, options, wait_for)
    print_report(report, Console())
    sys.stderr.writelines(f"error: {message}\n" for message in report.trouble)
    if report.ended_by is not None:
        sys.stderr.write(f"ended by {report.ended_by.name}; all processes have ended, too\n")
    if options.as_one_json:
        write_json(report.summary())
    if report.ended_by is not None:
        raise typer.Exit(128 + report.ended_by)
    if not report.ok:
        raise typer.Exit(1)


async def run_demo(options: DemoOptions, on_progress: OnProgress) -> DemoReport:
    """The report of a run, or of as much of one as there was."""
    report = DemoReport(options)
    with anyio.open_signal_receiver(*ENDING_SIGNALS) as signals, _private_folder() as folder:
        async with anyio.create_task_group() as tasks:

            async def end_on_signal() -> None:
                report.ended_by = await anext(aiter(signals))
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_on_signal)
            try:
                await _Run(report, folder, on_progress).serve()
            except* KVBusError as errors:
                report.trouble += dict.fromkeys(error.message for error in leaves(errors))
            await compare(report, on_progress)
            tasks.cancel_scope.cancel()
    return report


class _Run:
    """Two agents, two engines, and the router's part: it takes tickets from one to the other."""

    def __init__(self, report: DemoReport, folder: Path, on_progress: OnProgress) -> None:
        self._report, self._options, self._folder = report, report.options, folder
        self._on_progress = on_progress
        self._keys = ToolKeys(folder) if report.options.keys else None
        self._engines: dict[str, EngineChild] = {}

    async def serve(self) -> None:
        """All requests, and count what is held after the last one."""
        self._on_progress("the demo: starting two agents and two engines")
        async with AsyncExitStack() as stack:
            for role in self._options.sides:
                await stack.enter_async_context(self._agent(role))
            for role in self._options.sides:
                attach = self._folder / role / "attach.sock"
                engine = engine_at(role, attach, self._options, log=self._log(f"{role}-engine"))
                self._engines[role] = await stack.enter_async_context(engine)
            endpoints = {
                role: await engine.ask(str, "endpoint") for role, engine in self._engines.items()
            }
            await self._serve_all()
            await self._count_leaks(endpoints)

    def _agent(self, role: str) -> AbstractAsyncContextManager[object]:
        settings = {"agent_id": f"{role}-demo", **AGENT_SETTINGS[role]}
        if role == "decode" and self._options.path is not None:
            settings["path"] = self._options.path.value
        if self._keys:
            settings |= self._keys.settings(role)
        log = self._log(f"{role}-agent")
        return agent_process(role, self._folder, log=log, settings=settings)

    def _log(self, name: str) -> Path:
        log = (self._options.keep_logs or self._folder) / f"{name}.log"
        log.unlink(missing_ok=True)
        return log

    async def _serve_all(self) -> None:
        """Some requests in flight at a time."""
        num_requests, prompts = self._options.requests, self._options.prompts
        numbers, num_ended = iter(range(num_requests)), count(1)

        async def serve_in_turn() -> None:
            for number in numbers:
                served = Served(f"request-{number}", prompts[number % len(prompts)])
                self._report.served.append(served)
                try:
                    await self._hand_off(served)
                except RequestRefused as error:
                    served.failed = error
                self._on_progress(f"the demo: handing off ({next(num_ended)}/{num_requests})")

        async with anyio.create_task_group() as tasks:
            for _ in range(self._options.concurrency):
                tasks.start_soon(serve_in_turn)

    async def _hand_off(self, served: Served) -> None:
        """The ticket goes to decode at once, the first token when prefill is done."""
        prefill, decode = self._engines.values()
        ticket = await prefill.ask(
            dict[str, Any], "prefill", request_id=served.request_id, prompt=served.prompt
        )
        halves = await asyncio.gather(
            compute(prefill, served),
            fetch(decode, served, ticket, self._options),
            return_exceptions=True,
        )
        for failure in halves:
            if failure is not None:
                raise failure
        await generate(decode, served, self._options)

    async def _count_leaks(self, endpoints: dict[str, str]) -> None:
        """What engines and agents hold after the last request."""
        leaks, counts = dict[str, int](), dict[str, int]()
        for role, engine in self._engines.items():
            leaks[f"blocks of the {role} engine"] = await engine.ask(int, "settle")
        for role, endpoint in endpoints.items():
            curve = self._keys.of(role) if self._keys else None
            status = await ask_agent(endpoint, Status(), timeout_s=ASK_TIMEOUT_S, curve=curve)
            counts |= status.counts
        self._report.leaks = leaks | {what: counts[what] for what in ("offers", "fetches")}


def engine_at(
    role: str, attach: Path, options: DemoOptions, *, log: Path, engine_id: str | None = None
) -> AbstractAsyncContextManager[EngineChild]:
    """The engine of ``role`` in its process, at the agent there.

    Its cache is as large as ``concurrency`` requests need, so that all blocks are reused.
    """
    words = options.sides[role]
    spec = options.spec(engine_id or f"{role}-engine", words)
    num_new = options.max_new_tokens if role == "decode" else 0
    per_request = num_blocks_for(options.max_prompt_tokens + num_new, words.block)
    num_blocks = {group.name: options.concurrency * per_request for group in spec.groups}
    ring_blocks = None
    if words.ring is not None:
        ring_blocks = {name: max(1, round(words.ring * n)) for name, n in num_blocks.items()}
    setup = EngineSetup(
        attach_path=str(attach),
        spec=spec,
        layout=words.parse(),
        num_blocks=num_blocks,
        ring_blocks=ring_blocks,
        seed=options.seed,
        prefill_chunk=options.prefill_chunk,
        flip_one_byte=options.flip_one_byte and role == "decode",
    )
    text = msgspec.json.encode(setup).decode()
    return engine_process(f"{role} engine", "kvbus.demo.engine", text, log=log)


async def compute(prefill: EngineChild, served: Served) -> None:
    """Wait until the KV of a request is there; raises `RequestRefused`."""
    served.computed = await prefill.ask(Computed, "compute", request_id=served.request_id)


async def fetch(
    decode: EngineChild, served: Served, ticket: dict[str, Any], options: DemoOptions
) -> None:
    """Have the KV of a request fetched; raises `RequestRefused`."""
    served.taken = await decode.ask(
        Taken,
        "fetch",
        request_id=served.request_id,
        ticket=ticket,
        num_tokens=len(encode(served.prompt)),
        num_new=options.max_new_tokens - 1,
    )


async def generate(decode: EngineChild, served: Served, options: DemoOptions) -> None:
    """Have it go on from the first token, with what was fetched."""
    if served.computed is not None:
        served.steps = await decode.ask(
            list[Step],
            "generate",
            request_id=served.request_id,
            token=served.computed.step.token,
            num_new=options.max_new_tokens - 1,
        )


async def compare(report: DemoReport, on_progress: OnProgress = lambda _: None) -> None:
    """Run the model alone, in this process, on each prompt that has an output."""
    prompts = sorted(report.not_compared)
    if not prompts:
        return
    on_progress("the demo: running the model alone")
    alone = await anyio.to_thread.run_sync(_load_model, report.options)
    for prompt in prompts:
        report.alone[prompt] = await anyio.to_thread.run_sync(alone, prompt)


def _load_model(options: DemoOptions) -> Callable[[str], list[Step]]:
    """The reference. Loading torch takes a second, which would delay the start of the processes."""
    from kvbus.demo.model import Transformer, generate_alone  # noqa: PLC0415 - see above

    model = Transformer(options.spec("alone"), options.seed)
    return lambda prompt: generate_alone(
        model, encode(prompt), options.max_new_tokens, tokens_per_pass=options.prefill_chunk
    )


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
