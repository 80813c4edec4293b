"""One side of a demo over several machines: an engine at an agent that already runs there.

    kvbus demo-prefill --attach A | kvbus demo-decode --attach B

What goes between the two is a router by hand: a line of JSON for each request, its ticket in it.
Refuses to judge by what the other side says: the decode side runs the model alone, by its options.
"""

import socket
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import anyio
import msgspec
import typer

from kvbus.demo.messages import (
    NO_REQUEST,
    Decode,
    Decoded,
    FirstToken,
    Offered,
    Prefill,
    Prefilled,
    Ready,
    Settle,
    Settled,
    Step,
)
from kvbus.demo.options import DemoOptions, ReadPath
from kvbus.demo.processes import EngineLine, engine_setup
from kvbus.demo.prompts import encode
from kvbus.errors import ConfigError, RequestRefused, RequestTimeout
from kvbus.memory.attach import connect_to_agent
from kvbus.spawn import Child
from kvbus.text import printable

NUM_WAITS = 3  # of twenty seconds each without a block that comes back


@dataclass(frozen=True, kw_only=True)
class SideOptions(DemoOptions):
    """Those of the demo, but for what its agents are told: these have configurations already."""

    attach: Annotated[
        Path, typer.Option(metavar="SOCKET", help="Attach socket of the agent of this machine.")
    ]
    keep_logs: Path | None = None
    keys: bool = False
    as_one_json: bool = False
    path: ReadPath = ReadPath.AUTO


class Handed(msgspec.Struct, frozen=True):
    """What the prefill side tells the decode side of one request."""

    request_id: str
    prompt: str
    ticket: dict[str, Any]
    first: Step


@dataclass(frozen=True)
class Generated:
    """One request on the decode side; ``failed`` says why it has no output."""

    handed: Handed
    decoded: Decoded | None
    failed: str = ""

    @property
    def steps(self) -> list[Step]:
        """The steps of both sides."""
        return [self.handed.first, *(self.decoded.steps if self.decoded else [])]


@dataclass(frozen=True)
class Outcome:
    """What came of one request, and whether it is what the model generates alone."""

    generated: Generated
    matches: bool


@asynccontextmanager
async def engine_at(role: str, options: SideOptions) -> AsyncIterator[EngineLine]:
    """The line to a ready engine of ``role``; raises `PeerLost` without an agent, or when it ends.

    The engine itself waits for its agent, as those of `kvbus demo` start with theirs.
    """
    connect_to_agent(options.attach).close()
    engine_id = f"{role}-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="kvbus-demo-") as folder:
        setup = msgspec.structs.replace(
            engine_setup(role, options, Path(folder)),
            engine_id=engine_id,
            attach_path=str(options.attach),
        )
        ours, theirs = socket.socketpair()
        with theirs:
            line = await EngineLine.over(ours)
            command = sys.executable, "-m", f"kvbus.demo.{role}_engine"
            engine = Child.start(
                f"{role} engine",
                [*command, msgspec.json.encode(setup).decode()],
                log=Path(folder) / "log",
                stdin=theirs.fileno(),
            )
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch, engine)
                tasks.start_soon(line.listen)
                await line.answer(NO_REQUEST, Ready)
                yield line
                tasks.cancel_scope.cancel()
        finally:
            line.close()
            await engine.end_async()


async def _watch(engine: Child) -> None:
    await engine.ended()
    raise engine.lost()


async def prefill_side(options: SideOptions) -> None:
    """Compute and offer all requests, a line on stdout each; return once all have been read.

    Raises `RequestTimeout` when nobody reads them.
    """
    numbers = iter(range(options.requests))
    async with engine_at("prefill", options) as line:

        async def serve_in_turn() -> None:
            for number in numbers:
                prompt = options.prompts[number % len(options.prompts)]
                handed = await _prefilled(line, f"{uuid.uuid4().hex[:12]}-{number}", prompt)
                print(msgspec.json.encode(handed).decode(), flush=True)

        async with anyio.create_task_group() as servers:
            for _ in range(options.concurrency):
                servers.start_soon(serve_in_turn)
        sys.stdout.close()  # the other side need not wait for us, who wait for it
        await _all_read(line)


async def _prefilled(line: EngineLine, request_id: str, prompt: str) -> Handed:
    await line.send(Prefill(request_id, prompt))
    ticket = (await line.answer(request_id, Offered)).ticket
    first = (await line.answer(request_id, Prefilled)).step
    return Handed(request_id, prompt, ticket, first)


async def _all_read(line: EngineLine) -> None:
    for _ in range(NUM_WAITS):
        await line.send(Settle(NO_REQUEST))
        held = (await line.answer(NO_REQUEST, Settled)).num_blocks_held
        if not held:
            return
    raise RequestTimeout(
        f"{held} blocks of the prefill engine are still held: give every line of this command to"
        " kvbus demo-decode, which says what fails there"
    )


async def decode_side(options: SideOptions) -> list[Outcome]:
    """Fetch and go on with what each line of stdin hands over, until its end; then compare.

    Raises `ConfigError` at a terminal, which cuts long lines.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise ConfigError("stdin is no pipe: run kvbus demo-prefill ... | kvbus demo-decode ...")
    generated: list[Generated] = []
    places = anyio.Semaphore(options.concurrency)
    async with engine_at("decode", options) as line:

        async def serve(handed: Handed) -> None:
            one = await _generated(line, handed, options.max_new_tokens - 1)
            places.release()
            generated.append(one)
            if one.failed:
                sys.stderr.write(printable(f"error: {handed.request_id} failed: {one.failed}\n"))

        async with anyio.create_task_group() as tasks:
            async for text in anyio.wrap_file(sys.stdin):
                await places.acquire()
                tasks.start_soon(serve, _parsed(text))
    return await anyio.to_thread.run_sync(_compared, generated, options)


def _parsed(text: str) -> Handed:
    try:
        return msgspec.json.decode(text, type=Handed)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"stdin: {text[:80]!r} is no line of kvbus demo-prefill: {error}"
        ) from error


async def _generated(line: EngineLine, handed: Handed, num_steps: int) -> Generated:
    request_id = handed.request_id
    await line.send(Decode(request_id, handed.ticket, len(encode(handed.prompt)), num_steps))
    await line.send(FirstToken(request_id, handed.first.token))
    try:
        return Generated(handed, await line.answer(request_id, Decoded))
    except RequestRefused as error:
        return Generated(handed, None, f"{error.code}: {error.message}")


def _compared(generated: list[Generated], options: SideOptions) -> list[Outcome]:
    """Each with what the model generates without a handoff; the import of torch takes a second."""
    from kvbus.demo.model import Transformer, generate_alone  # noqa: PLC0415 - see above

    model = Transformer(options.model)
    alone = {
        prompt: generate_alone(
            model,
            encode(prompt),
            options.max_new_tokens,
            tokens_per_pass=options.prefill_chunk,
        )
        for prompt in {one.handed.prompt for one in generated if one.decoded is not None}
    }
    return [
        Outcome(one, matches=one.decoded is not None and one.steps == alone[one.handed.prompt])
        for one in generated
    ]
