"""The options of ``kvbus plan``: their types, bounds and help texts.

Refuses values out of range; what a spec says is for `kvbus.plan.spec`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbus.plan.keys import MAX_SPAN


class PathChoice(StrEnum):
    """A path, or the cost model's choice."""

    AUTO = "auto"
    DIRECT = "direct"
    PACKED = "packed"
    REORDERED = "reordered"


From = Annotated[
    str,
    typer.Option("--from", metavar="SPEC", help="The prefill engine: a text or a TOML file."),
]
To = Annotated[
    str, typer.Option("--to", metavar="SPEC", help="The decode engine: a text or a TOML file.")
]
Tokens = Annotated[
    int, typer.Option(min=0, max=MAX_SPAN, metavar="N", help="Tokens of the request.")
]
FirstToken = Annotated[
    int,
    typer.Option(
        min=0, max=MAX_SPAN, metavar="M", help="First token to move: those before it are there."
    ),
]
WantedPath = Annotated[
    PathChoice, typer.Option("--path", help="The path, or auto for the fastest.")
]
Contiguous = Annotated[
    bool,
    typer.Option("--contiguous", help="Blocks in order, as in an empty cache; else scattered."),
]
SlotBytes = Annotated[
    int,
    typer.Option(min=4096, max=1 << 30, metavar="BYTES", help="Size of the agents' staging slots."),
]
RatesFile = Annotated[
    Path | None,
    typer.Option(
        "--rates", metavar="FILE", help="Rates of your machines: TOML with the keys of --json."
    ),
]
AsOneJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, as the last line of stdout.")
]
SvgFile = Annotated[
    Path | None, typer.Option("--svg", metavar="FILE", help="Write a picture of the reads there.")
]
