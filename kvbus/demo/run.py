"""Commands ``kvbus demo``, ``demo-prefill`` and ``demo-decode``.

    prefill side ──Handed──▶ decode side

Between both sides is a stream within one command, or a pipe between two machines. The decode side
runs the model alone itself. A run always reports its results so far. A signal ends the run, but
never its clean-up.
"""

import signal
import tempfile
import uuid
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated

import anyio
import msgspec
import typer

from kvbus.demo.options import DemoOptions, EngineSetup, Handed, Step, encode
from kvbus.demo.report import DemoReport, Served
from kvbus.errors import ConfigError, KVBusError, RequestRefused, RequestTimeout, leaves
from kvbus.geometry import num_blocks_for
from kvbus.lab.pipe import Pipe
from kvbus.lab.process import EngineChild, Settings, Taken, agent_process, engine_process
from kvbus.memory.attach import query_agent
from kvbus.options import with_options
from kvbus.output import waiting_for
from kvbus.protocol.engine import AgentRole

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


PIPE = Pipe("kvbus demo-prefill", "kvbus demo-decode")
READ_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SideOptions(DemoOptions):
    """Options of one side, whose agent is configured already."""

    attach: Annotated[
        Path, typer.Option(metavar="SOCKET", help="Attach socket of the agent of this machine.")
    ]
    as_one_json: bool = False
    path: None = None


@dataclass(frozen=True, kw_only=True)
class PrefillOptions(SideOptions):
    roles = (AgentRole.PREFILL,)
    decode: str = ""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions(SideOptions):
    roles = (AgentRole.DECODE,)
    prefill: str = ""


@with_options(DemoOptions)
def demo(options: DemoOptions) -> None:
    """Hand requests from a prefill engine to a decode engine; compare with the model run alone.

    A SPEC has the engine's own settings, such as `tp=2 layout=HND block=48`, separated by spaces or
    commas.

    * `tp`, `pp`: ranks that share the KV heads, stages that share the 4 layers (1)
    * `layout`: order of the axes within a block, `NHD` or `HND` (NHD); `cross_layer=true` puts
      all layers into one region
    * `block`: tokens in a block (16)
    * `ring`: a cache that no agent can map, copied through a ring of host blocks; the number is the
      ring's share of the cache, such as `0.5` (none)

    Exit status 0: all outputs are equal, tokens and logits, and no block leaked.
    """
    report = run(_demo, options)
    report.print()
    report.end(is_ok=report.ok)


@with_options(PrefillOptions)
def demo_prefill(options: PrefillOptions) -> None:
    """Offer requests at this machine's prefill agent; print their tickets, for demo-decode.

    Exit status 0: all requests were read. `kvbus demo --help` explains a SPEC.
    """
    _check_agent(options.attach, AgentRole.PREFILL)
    report = run(partial(_offer, options.attach), options)
    report.end(is_ok=not report.trouble)


@with_options(DecodeOptions)
def demo_decode(options: DecodeOptions) -> None:
    """Fetch what demo-prefill offered, by the lines on stdin; compare with the model run alone.

    Exit status 0: all requests arrived, and all outputs are equal. Use the same options for model
    and requests as in demo-prefill. `kvbus demo --help` explains a SPEC.
    """
    _check_agent(options.attach, AgentRole.DECODE)
    report = run(partial(_read, options.attach), options)
    report.print()
    report.end(is_ok=report.ok)


def _check_agent(attach: Path, role: AgentRole) -> None:
    """Raise `KVBusError` unless an agent of ``role`` listens; an engine would wait for it."""
    agent = anyio.run(query_agent, attach)
    if agent.role is not role:
        raise ConfigError(
            f"--attach: a {agent.role} agent listens at {attach}; kvbus demo-{role} needs the "
            f"socket of a {role} agent"
        )


class Run:
    def __init__(self, report: DemoReport, folder: Path, wait_for: Callable[[str], None]) -> None:
        self.report, self.options = report, report.options
        self.folder, self.wait_for = folder, wait_for
        self._id = uuid.uuid4().hex[:12]

    def engine(self, role: str, attach: Path) -> AbstractAsyncContextManager[EngineChild]:
        """Start an engine. Its cache fits ``concurrency`` requests, so that blocks are reused."""
        options, words = self.options, self.options.sides[role]
        spec = options.spec(f"{role}-{self._id}", words)
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
            prefill_chunk=options.prefill_chunk,
            flip_one_byte=options.flip_one_byte and role == "decode",
        )
        text = msgspec.json.encode(setup).decode()
        log = self.folder / f"{role}-engine.log"
        return engine_process(f"{role} engine", "kvbus.demo.engine", text, log=log)

    async def offer_all(
        self, engine: EngineChild, send: Callable[[Handed], Awaitable[None]]
    ) -> None:
        numbers, prompts = iter(range(self.options.requests)), self.options.prompts

        async def serve_in_turn() -> None:
            for number in numbers:
                request_id, prompt = f"{self._id}-{number}", prompts[number % len(prompts)]
                asked = partial(engine.ask, request_id=request_id)
                try:
                    handed = await asked(Handed, "prefill", prompt=prompt)
                    await send(handed)
                    if handed.first is None:
                        first = await asked(Step, "compute")
                        await send(msgspec.structs.replace(handed, first=first))
                except RequestRefused as error:
                    failed = f"{error.code}: {error.message}"
                    await send(Handed(request_id, prompt, failed=failed))

        async with anyio.create_task_group() as tasks:
            for _ in range(self.options.concurrency):
                tasks.start_soon(serve_in_turn)

    async def read_all(self, engine: EngineChild, given: AsyncIterable[Handed]) -> None:
        known: dict[str, Served] = {}
        num_left = self.options.requests
        async with anyio.create_task_group() as tasks:
            async for handed in given:
                served = known.get(handed.request_id)
                if served is None:
                    served = known[handed.request_id] = Served(handed.request_id, handed.prompt)
                    self.report.served.append(served)
                    if not handed.failed:
                        tasks.start_soon(self._read, engine, served, handed.ticket)
                if handed.first or handed.failed:
                    served.first, served.failed = handed.first, handed.failed
                    served.prefill_ended.set()
                    num_left -= 1
                if not num_left:
                    break

    async def count_leaks(self, engines: Mapping[str, EngineChild]) -> None:
        self.wait_for("all blocks to come back")
        self.report.leaks = {
            role: (await engine.ask(list[int], "settle"))[0] for role, engine in engines.items()
        }

    @cached_property
    def alone(self) -> Callable[[str], list[Step]]:
        from kvbus.demo.model import Transformer, generate_alone  # noqa: PLC0415 - torch is slow

        options, model = self.options, Transformer(self.options.spec("alone"))
        chunk = options.prefill_chunk
        return lambda prompt: generate_alone(
            model, encode(prompt), options.max_new_tokens, tokens_per_pass=chunk
        )

    async def _read(self, engine: EngineChild, served: Served, ticket: dict[str, object]) -> None:
        """Fetch with the ticket, and generate after prefill's first token."""
        asked = partial(engine.ask, request_id=served.request_id)
        num_tokens, num_new = len(encode(served.prompt)), self.options.max_new_tokens - 1
        try:
            served.taken = await asked(
                Taken, "fetch", ticket=ticket, num_tokens=num_tokens, num_new=num_new
            )
            await served.prefill_ended.wait()
            if served.first is not None:
                token = served.first.token
                served.steps = await asked(list[Step], "generate", token=token, num_new=num_new)
        except RequestRefused as error:
            served.failed = f"{error.code}: {error.message}"
        if num_left := self.report.num_unfinished:
            self.wait_for(f"{num_left} of {self.options.requests} requests")


async def _offer(attach: Path, run: Run) -> None:
    """Raises `PeerLost` if the decode side ends early, `RequestTimeout` if it stops reading."""

    async def send(handed: Handed) -> None:
        run.wait_for(f"{PIPE.reader} to read")
        PIPE.write(handed)
        if handed.failed:
            run.report.trouble.append(f"{handed.request_id}: {handed.failed}")

    async with run.engine("prefill", attach) as engine, anyio.create_task_group() as tasks:
        tasks.start_soon(PIPE.watch_reader)
        await run.offer_all(engine, send)
        num_held, num_unread = await engine.ask(list[int], "settle", stall_s=READ_WITHIN_S)
        tasks.cancel_scope.cancel()
    if num_held or num_unread:
        held = f"{num_held} blocks are still held" if num_held else f"{num_unread} ended otherwise"
        raise RequestTimeout(
            f"not all of {run.options.requests} offers were read, {held}: look at the error of"
            f" {PIPE.reader}"
        )


async def _read(attach: Path, run: Run) -> None:
    async with run.engine("decode", attach) as engine:
        await run.read_all(engine, PIPE.read(Handed))
        await run.count_leaks({"decode": engine})


async def _demo(run: Run) -> None:
    options, engines = run.options, dict[str, EngineChild]()
    async with AsyncExitStack() as stack:
        for role in options.sides:
            settings = {"agent_id": f"{role}-demo", **AGENT_SETTINGS[role]}
            if role == "decode" and options.path is not None:
                settings["path"] = options.path.value
            log = run.folder / f"{role}-agent.log"
            agent = agent_process(role, run.folder, log=log, settings=settings)
            await stack.enter_async_context(agent)
        for role in options.sides:
            engine = run.engine(role, run.folder / role / "attach.sock")
            engines[role] = await stack.enter_async_context(engine)
        send, receive = anyio.create_memory_object_stream[Handed](options.concurrency)
        async with send, receive, anyio.create_task_group() as tasks:
            tasks.start_soon(run.offer_all, engines["prefill"], send.send)
            await run.read_all(engines["decode"], receive)
        await run.count_leaks(engines)


Work = Callable[[Run], Awaitable[None]]


def run(work: Work, options: DemoOptions) -> DemoReport:
    report = DemoReport(options)
    with (
        waiting_for("processes to start") as wait_for,
        tempfile.TemporaryDirectory(prefix="kvbus-demo-") as folder,
    ):
        anyio.run(_until_a_signal, work, Run(report, Path(folder), wait_for))
    return report


async def _until_a_signal(work: Work, run: Run) -> None:
    report = run.report
    with anyio.open_signal_receiver(*ENDING_SIGNALS) as signals:
        async with anyio.create_task_group() as tasks:

            async def end_on_signal() -> None:
                report.ended_by = await anext(aiter(signals))
                tasks.cancel_scope.cancel()

            tasks.start_soon(end_on_signal)
            try:
                await work(run)
            except* KVBusError as errors:
                report.trouble += dict.fromkeys(error.message for error in leaves(errors))
            for prompt in sorted(report.not_compared):
                run.wait_for("the model run alone")
                report.alone[prompt] = await anyio.to_thread.run_sync(run.alone, prompt)
            tasks.cancel_scope.cancel()
