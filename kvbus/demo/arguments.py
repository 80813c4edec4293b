"""The options of ``kvbus demo``: their types, bounds and help texts.

Refuses values out of range; what depends on several of them is for `DemoOptions`.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvbus.demo.options import Layout

MAX_TP = 8  # the model has eight query heads

Requests = Annotated[int, typer.Option(min=1, max=100_000, metavar="N", help="How many to serve.")]
Concurrency = Annotated[int, typer.Option(min=1, max=256, metavar="N", help="How many at a time.")]
PrefillTp = Annotated[
    int, typer.Option(min=1, max=MAX_TP, metavar="N", help="Ranks of the prefill engine.")
]
DecodeTp = Annotated[
    int,
    typer.Option(
        min=1,
        max=MAX_TP,
        metavar="N",
        help="Ranks of the decode engine; as many, or it is refused.",
    ),
]
BlockSize = Annotated[
    int, typer.Option(min=1, max=4096, metavar="N", help="Tokens in a block of the KV caches.")
]
BlockLayout = Annotated[
    Layout, typer.Option(case_sensitive=False, help="Order of the axes within a block.")
]
CrossLayer = Annotated[
    bool,
    typer.Option("--cross-layer/--per-layer", help="One region of all layers, or one for each."),
]
MaxNewTokens = Annotated[
    int, typer.Option(min=1, max=4095, metavar="N", help="Tokens to generate for each request.")
]
PromptFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Prompts, one a line, instead of the built-in ones."),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**32, metavar="N", help="Seed of the model's weights.")
]
KeepLogs = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Keep the logs of the four processes there.")
]
AsOneJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, as the last line of stdout.")
]
FlipOneByte = Annotated[bool, typer.Option("--flip-one-byte", hidden=True)]
