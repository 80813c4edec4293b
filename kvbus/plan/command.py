"""The command ``kvbus plan``: its options, what it prints, its exit status.

Refuses a bad spec with one line and exit status 2, engines that do not fit with exit status 1.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from rich.console import Console
from typer import Option

from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.output import fail, write_json
from kvbus.plan.cost_inputs import DEFAULT_SLOT_BYTES, CostInputs, read_rates
from kvbus.plan.keys import MAX_SPAN
from kvbus.plan.picture import picture
from kvbus.plan.plan import PlannedRequest, make_plan
from kvbus.plan.report import as_json, print_plan
from kvbus.plan.spec import read_engine
from kvbus.planning import fetch_shape
from kvbus.planning.cost import Rates


class PathOption(StrEnum):
    """A path, or the cost model's choice."""

    AUTO = "auto"
    DIRECT = "direct"
    PACKED = "packed"
    REORDERED = "reordered"


From = Annotated[
    str, Option("--from", metavar="SPEC", help="The prefill engine: a text or a TOML file.")
]
To = Annotated[
    str, Option("--to", metavar="SPEC", help="The decode engine: a text or a TOML file.")
]
Tokens = Annotated[int, Option(min=0, max=MAX_SPAN, metavar="N", help="Tokens of the request.")]
FirstToken = Annotated[
    int,
    Option(
        min=0, max=MAX_SPAN, metavar="M", help="First token to move: those before it are there."
    ),
]
WantedPath = Annotated[PathOption, Option("--path", help="The path, or auto for the fastest.")]
Contiguous = Annotated[
    bool, Option("--contiguous", help="Blocks in order, as in an empty cache; else scattered.")
]
SlotBytes = Annotated[
    int, Option(min=4096, max=1 << 30, metavar="BYTES", help="Size of the agents' staging slots.")
]
RatesFile = Annotated[
    Path | None,
    Option("--rates", metavar="FILE", help="Rates of your machines: TOML with the keys of --json."),
]
AsOneJson = Annotated[
    bool, Option("--json", help="Print one JSON object, as the last line of stdout.")
]
SvgFile = Annotated[
    Path | None, Option("--svg", metavar="FILE", help="Write a picture of the reads there.")
]

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


def plan(
    *,
    prefill: From,
    decode: To,
    tokens: Tokens,
    first_token: FirstToken = 0,
    path: WantedPath = PathOption.AUTO,
    contiguous: Contiguous = False,
    slot_bytes: SlotBytes = DEFAULT_SLOT_BYTES,
    rates: RatesFile = None,
    as_one_json: AsOneJson = False,
    svg: SvgFile = None,
) -> None:
    """See `HELP`."""
    try:
        inputs = _cost_inputs(rates, slot_bytes)
        if first_token > tokens:
            raise ConfigError(f"--first-token: {first_token} is more than --tokens {tokens}")
        wanted = None if path is PathOption.AUTO else fetch_shape.Path(path)
        request = PlannedRequest(tokens, first_token, wanted, contiguous)
        engines = read_engine("--from", prefill), read_engine("--to", decode)
        found = make_plan(*engines, request, inputs)
        if svg is not None:
            _write_picture(svg, picture(found))
    except KVBusError as error:
        status = 1 if error.code is ErrorCode.INCOMPATIBLE else 2
        fail(error.message, status=status, cause=error)
    print_plan(found, Console(highlight=False))
    if as_one_json:
        write_json(as_json(found))


def _cost_inputs(file: Path | None, slot_bytes: int) -> CostInputs:
    try:
        rates = read_rates(file) if file else Rates()
    except KVBusError as error:
        raise ConfigError(f"--rates: {error.message}") from error
    return CostInputs(rates, str(file) if file else None, slot_bytes)


def _write_picture(file: Path, text: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--svg: cannot write {str(file)!r}: {error.strerror}") from error
