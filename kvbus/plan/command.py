"""The command ``kvbus plan``: its options, what it prints, its exit status.

Refuses a bad spec with one line and exit status 2, engines that do not fit with exit status 1.
"""

import json
import sys
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.plan import arguments as args
from kvbus.plan.outcome import as_values
from kvbus.plan.picture import picture
from kvbus.plan.plan import DEFAULT_SLOT_BYTES, Means, Plan, Request, make_plan
from kvbus.plan.rates import read_rates
from kvbus.plan.spec import read_side
from kvbus.plan.table import print_plan
from kvbus.planning import fetch_shape
from kvbus.planning.cost import Rates


def plan(
    *,
    prefill: args.From,
    decode: args.To,
    tokens: args.Tokens,
    first_token: args.FirstToken = 0,
    path: args.WantedPath = args.PathChoice.AUTO,
    contiguous: args.Contiguous = False,
    slot_bytes: args.SlotBytes = DEFAULT_SLOT_BYTES,
    rates: args.RatesFile = None,
    as_one_json: args.AsOneJson = False,
    svg: args.SvgFile = None,
) -> None:
    """Show what a handoff would read from whom, on which path, and how long it would take.

    A SPEC is a text such as `tp=4,layout=HND,block=16,kv_heads=8,head=128,layers=32,dtype=bf16`,
    or the path of a TOML file with the same keys. Needed are `layers`, `head` and, but for
    `attention=mla`, `kv_heads`.

    * `tp`, `pp`: tensor parallel ranks and pipeline stages (1); with fewer `kv_heads`, replicas
    * `layout`: `NHD`, `HND`, or all axes as `block.kv.token.head.dim` (NHD); `cross_layer=true`
      puts all layers into one region
    * `block`: tokens in a block (16)
    * `kv_heads`, `head`, `layers`, `dtype`: of the model (`dtype=bf16`)
    * `attention`: `gqa`, or `mla` with one latent of `head` elements (gqa)
    * `window`: every other layer has a sliding window of so many tokens (none)
    * `model`: both sides' must be equal (unnamed)

    In a file, `[[groups]]` may have `name`, `layers` (a list, or how many come next) and keys of
    their own; a group with `parts = [{name = "conv", units = 8, bytes = 4096}]` is an opaque state.

    Exit status 1: the KV of these two cannot be exchanged; 2: a mistake in a spec or an option.
    """
    try:
        chosen = read_rates(rates) if rates else Rates()
        means = Means(chosen, str(rates) if rates else None, slot_bytes)
        request = Request(_checked(tokens, first_token), first_token, _path(path), contiguous)
        sides = read_side("--from", prefill), read_side("--to", decode)
        found = make_plan(*sides, request, means)
    except KVBusError as error:
        _fail(error)
    _show(found, as_one_json=as_one_json, svg=svg)


def _show(found: Plan, *, as_one_json: bool, svg: Path | None) -> None:
    if svg is not None:
        try:
            svg.write_text(picture(found), encoding="utf-8")
        except OSError as error:
            _fail(ConfigError(f"--svg: cannot write {str(svg)!r}: {error.strerror}"))
    print_plan(found, Console(highlight=False))
    if as_one_json:
        sys.stdout.write(json.dumps(as_values(found)) + "\n")


def _checked(tokens: int, first_token: int) -> int:
    if first_token > tokens:
        raise ConfigError(f"--first-token: {first_token} is more than --tokens {tokens}")
    return tokens


def _path(choice: args.PathChoice) -> fetch_shape.Path | None:
    return None if choice is args.PathChoice.AUTO else fetch_shape.Path(choice)


def _fail(error: KVBusError) -> NoReturn:
    sys.stderr.write(f"error: {error.message}\n")
    raise typer.Exit(1 if error.code is ErrorCode.INCOMPATIBLE else 2) from error
