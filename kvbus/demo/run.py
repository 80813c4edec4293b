"""The command ``kvbus demo``. A signal ends the run, but not its clean-up and its report."""

import signal
import tempfile
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import anyio
import msgspec

from kvbus.demo.options import DemoOptions, EngineSetup, Step, encode
from kvbus.demo.report import DemoReport, Served
from kvbus.errors import ConfigError, KVBusError, RequestRefused, SegmentError, leaves
from kvbus.geometry import num_blocks_for
from kvbus.lab.process import EngineChild, Settings, TimedFetch, agent_process, engine_process
from kvbus.memory.cuda import check_ordinal, driver_version
from kvbus.options import with_options
from kvbus.output import waiting_for
from kvbus.progress import Progress
from kvbus.spec_text import gpu_number

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Deadlines of the agents. The defaults are too short on a busy machine.
AGENT_SETTINGS: dict[str, Settings] = {
    "prefill": {"drain_timeout_s": 2.0, "offer_ttl_s": 600.0},
    "decode": {
        "drain_timeout_s": 2.0,
        "fetch_timeout_s": 600.0,
        "request_timeout_s": 60.0,
        "lease_s": 30.0,
    },
}


@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Hand requests from a prefill engine to a decode engine; compare with the model run alone.

    A SPEC has the engine's own settings, such as `tp=2 layout=HND block=48`, separated by spaces or
    commas.

    * `tp`, `pp`: ranks that share the KV heads, stages that share the 4 layers (1)
    * `layout`: order of the axes within a block, `NHD` or `HND` (NHD); `cross_layer=true` puts
      all layers into one region
    * `block`: tokens in a block (16)
    * `device`: `cpu`, `cuda` or `cuda:N` (cpu); the model runs where the cache is, and needs torch
      for CUDA on a GPU
    * `ring`: a cache that no agent can map, copied through a ring of host blocks; the number is the
      ring's share of the cache, such as `0.5` (none)

    Exit status 0: all outputs are equal, tokens and logits, and no block leaked.
    """
    for role, fields in options.sides.items():
        _check_device(f"--{role}", fields.device)
    report = DemoReport(options)
    with (
        Progress(options.requests, "requests") as progress,
        waiting_for("processes to start") as wait_for,
        tempfile.TemporaryDirectory(prefix="kvbus-demo-") as folder,
    ):
        anyio.run(Run(report, Path(folder), wait_for, progress).until_a_signal)
    report.print()
    report.end()


def _check_device(option: str, device: str) -> None:
    """Raise `ConfigError` unless this machine's driver and torch have the GPU."""
    ordinal = gpu_number(device)
    if ordinal is None:
        return
    try:
        check_ordinal(ordinal)
    except SegmentError as error:
        raise ConfigError(f"{option} device={device}: {error.message}") from error
    import torch  # noqa: PLC0415 - torch is slow

    name = f"{option} device={device}: torch {torch.__version__}"
    if torch.version.cuda is None:
        raise ConfigError(f"{name} is built without CUDA: install a build for CUDA")
    if ordinal >= torch.cuda.device_count():
        raise ConfigError(
            f"{name} for CUDA {torch.version.cuda} cannot use it: the driver is for CUDA "
            f"{driver_version()}"
        )


class Run:
    def __init__(
        self,
        report: DemoReport,
        folder: Path,
        wait_for: Callable[[str], None],
        progress: Progress,
    ) -> None:
        self.report, self.options = report, report.options
        self.folder, self.wait_for, self.progress = folder, wait_for, progress
        self._id = uuid.uuid4().hex[:12]

    async def until_a_signal(self) -> None:
        report = self.report
        with anyio.open_signal_receiver(*ENDING_SIGNALS) as signals:
            async with anyio.create_task_group() as tasks:

                async def end_on_signal() -> None:
                    report.ended_by = await anext(aiter(signals))
                    tasks.cancel_scope.cancel()

                tasks.start_soon(end_on_signal)
                try:
                    await self._serve_all()
                except* KVBusError as errors:
                    report.trouble += dict.fromkeys(error.message for error in leaves(errors))
                for prompt in sorted(report.not_compared):
                    self.wait_for("the model run alone")
                    report.alone[prompt] = await anyio.to_thread.run_sync(
                        self._generate_alone, prompt
                    )
                tasks.cancel_scope.cancel()

    async def _serve_all(self) -> None:
        options, engines = self.options, dict[str, EngineChild]()
        numbers = iter(range(options.requests))  # shared by the workers
        async with AsyncExitStack() as stack:
            for role in options.sides:
                settings = {"agent_id": f"{role}-demo", **AGENT_SETTINGS[role]}
                if role == "decode" and options.path is not None:
                    settings["path"] = options.path.value
                log = self.folder / f"{role}-agent.log"
                agent = agent_process(role, self.folder, log=log, settings=settings)
                await stack.enter_async_context(agent)
            for role in options.sides:
                engine = self._engine(role, self.folder / role / "attach.sock")
                engines[role] = await stack.enter_async_context(engine)

            async def worker() -> None:
                for number in numbers:
                    prompt = options.prompts[number % len(options.prompts)]
                    served = Served(f"{self._id}-{number}", prompt)
                    self.report.served.append(served)
                    await self._serve(served, **engines)
                    self.progress.advance()
                    if num_left := self.report.num_unfinished:
                        self.wait_for(f"{num_left} of {options.requests} requests")

            async with anyio.create_task_group() as tasks:
                for _ in range(options.concurrency):
                    tasks.start_soon(worker)
            self.wait_for("all blocks to be released")
            self.report.leaks = {
                role: await engine.request(int, "settle") for role, engine in engines.items()
            }

    async def _serve(self, served: Served, prefill: EngineChild, decode: EngineChild) -> None:
        """Hand over the KV while it is computed; then generate after prefill's first token."""
        request_prefill = partial(prefill.request, request_id=served.request_id)
        request_decode = partial(decode.request, request_id=served.request_id)
        num_tokens, num_new = len(encode(served.prompt)), self.options.max_new_tokens - 1
        try:
            ticket = await request_prefill(dict[str, Any], "prefill", prompt=served.prompt)

            async def fetch() -> None:
                served.timed = await request_decode(
                    TimedFetch, "fetch", ticket=ticket, num_tokens=num_tokens, num_new=num_new
                )

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fetch)
                served.first = first = await request_prefill(Step, "compute")
            served.steps = await request_decode(
                list[Step], "generate", token=first.token, num_new=num_new
            )
        except* RequestRefused as errors:
            error = leaves(errors)[0]
            served.failed = f"{error.code}: {error.message}"

    @cached_property
    def _generate_alone(self) -> Callable[[str], list[Step]]:
        from kvbus.demo.model import Transformer, generate_alone  # noqa: PLC0415 - torch is slow

        options, spec = self.options, self.options.spec("alone")
        devices = [fields.device for fields in options.sides.values()]
        models = {device: Transformer(spec, device=device) for device in devices}
        model, decoder = (models[device] for device in devices)
        chunk = options.prefill_chunk
        return lambda prompt: generate_alone(
            model,
            encode(prompt),
            options.max_new_tokens,
            tokens_per_pass=chunk,
            decoder=decoder,
        )

    def _engine(self, role: str, attach: Path) -> AbstractAsyncContextManager[EngineChild]:
        options, fields = self.options, self.options.sides[role]
        spec = options.spec(f"{role}-{self._id}", fields)
        num_new = options.max_new_tokens if role == "decode" else 0
        per_request = num_blocks_for(options.max_prompt_tokens + num_new, fields.block)
        num_blocks = {group.name: options.concurrency * per_request for group in spec.groups}
        ring_blocks = None
        if fields.ring is not None:
            ring_blocks = {name: max(1, round(fields.ring * n)) for name, n in num_blocks.items()}
        setup = EngineSetup(
            attach_path=str(attach),
            spec=spec,
            layout=fields.parse(),
            device=fields.device,
            num_blocks=num_blocks,
            ring_blocks=ring_blocks,
            prefill_chunk=options.prefill_chunk,
            flip_one_byte=options.flip_one_byte and role == "decode",
        )
        text = msgspec.json.encode(setup).decode()
        log = self.folder / f"{role}-engine.log"
        return engine_process(f"{role} engine", "kvbus.demo.demo_engine", text, log=log)
