"""The commands ``kvbus demo-prefill`` and ``kvbus demo-decode``: their output and exit status."""

import sys
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import anyio
import typer

from kvbus.demo.sides import SideOptions, decode_side, prefill_side
from kvbus.errors import ConfigError, KVBusError, leaves
from kvbus.options import with_options
from kvbus.text import printable

T = TypeVar("T")


@with_options(SideOptions)
def demo_prefill(options: SideOptions) -> None:
    """Offer requests at this machine's prefill agent; print their tickets, for demo-decode.

    Ends with status 0 once all of them have been read.
    """
    _run(prefill_side, options)


@with_options(SideOptions)
def demo_decode(options: SideOptions) -> None:
    """Fetch what demo-prefill offered, by the lines on stdin; compare with the model run alone.

    Exit status 0: there were as many lines as requests, and all outputs are equal. Tell it all
    options of the model as demo-prefill.
    """
    outcomes = _run(decode_side, options)
    generated = [one.generated for one in outcomes]
    num_equal = sum(one.matches for one in outcomes)
    done = [one.decoded for one in generated if one.decoded is not None]
    paths = ", ".join(f"{count} {path}" for path, count in Counter(d.path for d in done).items())
    total = sum(one.num_bytes for one in done)
    typer.echo(
        f"{len(outcomes)} requests, {num_equal} outputs equal to the model run alone, tokens and"
        f" logits; {total / 1024:.0f} KiB read ({paths or 'no path'})"
    )
    if len(outcomes) != options.requests:
        sys.stderr.write(
            f"error: {len(outcomes)} lines came from kvbus demo-prefill, expected"
            f" {options.requests}: give both commands the same --requests, or look at its error\n"
        )
    if num_equal != options.requests or len(outcomes) != options.requests:
        raise typer.Exit(1)


def _run(side: Callable[[SideOptions], Coroutine[Any, Any, T]], options: SideOptions) -> T:
    """An error is one line on stderr and exit status 1, 2 for what was given wrongly."""
    errors: list[KVBusError] = []
    try:
        return anyio.run(side, options)
    except* KVBusError as group:
        errors = leaves(group)
    sys.stderr.writelines(f"error: {printable(error.message)}\n" for error in errors)
    raise typer.Exit(2 if any(isinstance(error, ConfigError) for error in errors) else 1)
