"""The command ``kvbus plan``: its options, what it prints, its exit status.

Refuses a bad spec with one line and exit status 2, engines that do not fit with exit status 1.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.options import with_options
from kvbus.output import fail, write_json
from kvbus.plan.keys import MAX_SPAN
from kvbus.plan.picture import picture
from kvbus.plan.plan import DEFAULT_SLOT_BYTES, Plan, PlannedRequest, make_plan
from kvbus.plan.report import as_json, print_plan
from kvbus.plan.spec import read_engine, read_rates
from kvbus.planning import fetch_shape
from kvbus.planning.cost import Rates


class PathOption(StrEnum):
    """A path, or the cost model's choice."""

    AUTO = "auto"
    DIRECT = "direct"
    PACKED = "packed"
    REORDERED = "reordered"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Two engines, a request, and what the time depends on."""

    prefill: Annotated[
        str, Option("--from", metavar="SPEC", help="The prefill engine: a text or a TOML file.")
    ]
    decode: Annotated[
        str, Option("--to", metavar="SPEC", help="The decode engine: a text or a TOML file.")
    ]
    tokens: Annotated[int, Option(min=0, max=MAX_SPAN, metavar="N", help="Tokens of the request.")]
    first_token: Annotated[
        int,
        Option(
            min=0, max=MAX_SPAN, metavar="M", help="First token to move: those before it are there."
        ),
    ] = 0
    path: Annotated[PathOption, Option(help="The path, or auto for the fastest.")] = PathOption.AUTO
    contiguous: Annotated[
        bool, Option("--contiguous", help="Blocks in order, as in an empty cache; else scattered.")
    ] = False
    slot_bytes: Annotated[
        int,
        Option(min=4096, max=1 << 30, metavar="BYTES", help="Size of the agents' staging slots."),
    ] = DEFAULT_SLOT_BYTES
    rates: Annotated[
        Path | None,
        Option(metavar="FILE", help="Rates of your machines: TOML with the keys of --json."),
    ] = None
    as_one_json: Annotated[
        bool, Option("--json", help="Print one JSON object, as the last line of stdout.")
    ] = False
    svg: Annotated[
        Path | None, Option(metavar="FILE", help="Write a picture of the reads there.")
    ] = None

    def plan(self) -> Plan:
        """The plan that they ask for."""
        rates = read_rates(self.rates) if self.rates else Rates()
        if self.first_token > self.tokens:
            raise ConfigError(
                f"--first-token: {self.first_token} is more than --tokens {self.tokens}"
            )
        request = PlannedRequest(
            num_tokens=self.tokens,
            first_token=self.first_token,
            path=None if self.path is PathOption.AUTO else fetch_shape.Path(self.path),
            is_contiguous=self.contiguous,
            rates=rates,
            rates_from=str(self.rates) if self.rates else None,
            slot_bytes=self.slot_bytes,
        )
        sides = read_engine("--from", self.prefill), read_engine("--to", self.decode)
        return make_plan(*sides, request)


HELP = """Show what a handoff would read from whom, on which path, and how long it would take.

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


@with_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """See `HELP`."""
    try:
        found = options.plan()
        if options.svg is not None:
            options.svg.write_text(picture(found), encoding="utf-8")
    except KVBusError as error:
        status = 1 if error.code is ErrorCode.INCOMPATIBLE else 2
        fail(error.message, status=status, cause=error)
    except OSError as error:
        message = f"--svg: cannot write {str(options.svg)!r}: {error.strerror}"
        fail(message, status=2, cause=error)
    print_plan(found, Console(highlight=False))
    if options.as_one_json:
        write_json(as_json(found))
