"""One side of a demo over several machines: an engine at an agent that already runs there.

    kvbus demo-prefill --attach A | kvbus demo-decode --attach B

The decode side does not trust what the other one says of outputs: it runs the model alone itself.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer

from kvbus.demo.messages import Handed
from kvbus.demo.options import DemoOptions
from kvbus.demo.run import Run, run
from kvbus.errors import KVBusError, RequestTimeout
from kvbus.lab.pipe import Pipe
from kvbus.memory.attach import connect_to_agent
from kvbus.options import with_options
from kvbus.output import fail

PIPE = Pipe("kvbus demo-prefill", "kvbus demo-decode")
READ_WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SideOptions(DemoOptions):
    """Those of the demo, but for what its agents are told: these have configurations already."""

    attach: Annotated[
        Path, typer.Option(metavar="SOCKET", help="Attach socket of the agent of this machine.")
    ]
    as_one_json: bool = False
    path: None = None


@with_options(SideOptions)
def demo_prefill(options: SideOptions) -> None:
    """Offer requests at this machine's prefill agent; print their tickets, for demo-decode.

    Ends with status 0 once all of them have been read. `kvbus demo --help` explains a SPEC.
    """
    _check_agent(options)
    report = run(partial(_offer, options.attach), options)
    report.end(is_ok=not report.trouble)


@with_options(SideOptions)
def demo_decode(options: SideOptions) -> None:
    """Fetch what demo-prefill offered, by the lines on stdin; compare with the model run alone.

    Exit status 0: there were as many as requests, and all outputs are equal. Tell it all options of
    the model and the requests as demo-prefill. `kvbus demo --help` explains a SPEC.
    """
    _check_agent(options)
    report = run(partial(_read, options.attach), options)
    report.print()
    report.end(is_ok=report.ok)


def _check_agent(options: SideOptions) -> None:
    """An engine waits for its agent, as those of `kvbus demo` start with theirs; a person not."""
    try:
        connect_to_agent(options.attach).close()
    except KVBusError as error:
        fail(error.message, status=1, cause=error)


async def _offer(attach: Path, run: Run) -> None:
    """Offer all, and return once all has been read.

    Raises `PeerLost` when the decode side ends before, `RequestTimeout` when it reads no more.
    """

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
