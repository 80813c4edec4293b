"""One side of a demo over several machines: an engine at an agent that already runs there.

    kvbus demo-prefill --attach A | kvbus demo-decode --attach B

What goes between the two is a router by hand: a line of JSON for each request, its ticket in it.
The decode side does not trust what the other one says of outputs: it runs the model alone itself.
"""

import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import anyio
import msgspec
import typer

from kvbus.demo.messages import Computed
from kvbus.demo.options import DemoOptions
from kvbus.demo.report import DemoReport, Served
from kvbus.demo.run import compare, engine_at, fetch, generate
from kvbus.errors import ConfigError, KVBusError, RequestRefused, RequestTimeout, leaves
from kvbus.lab.process import EngineChild
from kvbus.memory.attach import connect_to_agent
from kvbus.options import with_options
from kvbus.text import printable

NUM_WAITS = 3  # of twenty seconds each without a block that comes back

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SideOptions(DemoOptions):
    """Those of the demo, but for what its agents are told: these have configurations already."""

    attach: Annotated[
        Path, typer.Option(metavar="SOCKET", help="Attach socket of the agent of this machine.")
    ]
    keep_logs: Path | None = None
    keys: bool = False
    as_one_json: bool = False
    path: None = None


class Handed(msgspec.Struct, frozen=True):
    """What the prefill side tells the decode side of one request."""

    request_id: str
    prompt: str
    ticket: dict[str, Any]
    computed: Computed


@with_options(SideOptions)
def demo_prefill(options: SideOptions) -> None:
    """Offer requests at this machine's prefill agent; print their tickets, for demo-decode.

    Ends with status 0 once all of them have been read. `kvbus demo --help` explains a SPEC.
    """
    _run(_prefill, options)


@with_options(SideOptions)
def demo_decode(options: SideOptions) -> None:
    """Fetch what demo-prefill offered, by the lines on stdin; compare with the model run alone.

    Exit status 0: there were as many lines as requests, and all outputs are equal. Tell it all
    options of the model as demo-prefill. `kvbus demo --help` explains a SPEC.
    """
    report = _run(_decode, options)
    num_lines, num_equal = len(report.served), report.num_matched
    paths = Counter(taken.fetched.path for taken in report.taken)
    read = ", ".join(f"{number} {path}" for path, number in paths.items()) or "no path"
    typer.echo(
        f"{num_lines} requests, {num_equal} outputs equal to the model run alone, tokens and"
        f" logits; {report.num_bytes / 1024:.0f} KiB read ({read})"
    )
    if num_lines != options.requests:
        sys.stderr.write(
            f"error: {num_lines} lines came from kvbus demo-prefill, expected"
            f" {options.requests}: give both commands the same --requests, or look at its error\n"
        )
    if num_equal != options.requests or num_lines != options.requests:
        raise typer.Exit(1)


def _run(side: Callable[[SideOptions], Coroutine[Any, Any, T]], options: SideOptions) -> T:
    """An error is one line on stderr and exit status 1, 2 for what was given wrongly."""
    errors: list[KVBusError] = []
    try:
        return anyio.run(side, options)
    except* KVBusError as group:
        errors = leaves(group)
    messages = dict.fromkeys(error.message for error in errors)
    sys.stderr.writelines(f"error: {printable(message)}\n" for message in messages)
    raise typer.Exit(2 if any(isinstance(error, ConfigError) for error in errors) else 1)


@asynccontextmanager
async def _engine(role: str, options: SideOptions) -> AsyncIterator[EngineChild]:
    """A ready engine of ``role``; raises `PeerLost` without an agent, or when it ends.

    The engine itself waits for its agent, as those of `kvbus demo` start with theirs.
    """
    connect_to_agent(options.attach).close()
    engine_id = f"{role}-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="kvbus-demo-") as folder:
        log = Path(folder) / "log"
        async with engine_at(role, options.attach, options, log=log, engine_id=engine_id) as engine:
            await engine.ask(str, "endpoint")
            yield engine


async def _prefill(options: SideOptions) -> None:
    """Compute and offer all requests, a line on stdout each; return once all have been read.

    Raises `RequestTimeout` when nobody reads them.
    """
    numbers = iter(range(options.requests))
    async with _engine("prefill", options) as engine:

        async def serve_in_turn() -> None:
            for number in numbers:
                prompt = options.prompts[number % len(options.prompts)]
                handed = await _handed(engine, f"{uuid.uuid4().hex[:12]}-{number}", prompt)
                print(msgspec.json.encode(handed).decode(), flush=True)

        async with anyio.create_task_group() as servers:
            for _ in range(options.concurrency):
                servers.start_soon(serve_in_turn)
        sys.stdout.close()  # the other side need not wait for us, who wait for it
        await _all_read(engine)


async def _handed(engine: EngineChild, request_id: str, prompt: str) -> Handed:
    ticket = await engine.ask(dict[str, Any], "prefill", request_id=request_id, prompt=prompt)
    computed = await engine.ask(Computed, "compute", request_id=request_id)
    return Handed(request_id, prompt, ticket, computed)


async def _all_read(engine: EngineChild) -> None:
    for _ in range(NUM_WAITS):
        held = await engine.ask(int, "settle")
        if not held:
            return
    raise RequestTimeout(
        f"{held} blocks of the prefill engine are still held: give every line of this command to"
        " kvbus demo-decode, which says what fails there"
    )


async def _decode(options: SideOptions) -> DemoReport:
    """Fetch and go on with what each line of stdin hands over, until its end; then compare.

    Raises `ConfigError` at a terminal, which cuts long lines.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("stdin is no pipe: run kvbus demo-prefill ... | kvbus demo-decode ...")
    report, places = DemoReport(options), anyio.Semaphore(options.concurrency)
    async with _engine("decode", options) as engine:

        async def serve(handed: Handed) -> None:
            served = Served(handed.request_id, handed.prompt, computed=handed.computed)
            report.served.append(served)
            try:
                await fetch(engine, served, handed.ticket, options)
                await generate(engine, served, options)
            except RequestRefused as error:
                served.failed = error
                told = f"error: {served.request_id} failed: {error.code}: {error.message}\n"
                sys.stderr.write(printable(told))
            places.release()

        async with anyio.create_task_group() as tasks:
            async for text in anyio.wrap_file(sys.stdin):
                await places.acquire()
                tasks.start_soon(serve, _parsed(text))
    await compare(report)
    return report


def _parsed(text: str) -> Handed:
    try:
        return msgspec.json.decode(text, type=Handed)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"stdin: {text[:80]!r} is no line of kvbus demo-prefill: {error}"
        ) from error
