"""The options of the proxy's command: their types, bounds and help texts.

Refuses values out of range; what an address may be is for `ProxyOptions`.
"""

from enum import StrEnum
from typing import Annotated

import typer

from kvbus.integrations.proxy.options import IfPrefillFails


class LogFormat(StrEnum):
    """How log lines look."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


Prefill = Annotated[
    list[str],
    typer.Option(
        "--prefill", metavar="URL", help="A prefill server, as http://host:8100; repeat for more."
    ),
]
Decode = Annotated[
    list[str],
    typer.Option(
        "--decode", metavar="URL", help="A decode server, as http://host:8200; repeat for more."
    ),
]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")]
Port = Annotated[
    int, typer.Option(min=0, max=65535, metavar="PORT", help="The port; 0 for a free one.")
]
HealthInterval = Annotated[
    float,
    typer.Option(
        min=0.05, max=3600.0, metavar="SECONDS", help="Time between two checks of a server."
    ),
]
MaxInFlight = Annotated[
    int,
    typer.Option(
        min=1, max=100_000, metavar="N", help="Requests at once; one more is answered 503."
    ),
]
OnFailedPrefill = Annotated[
    IfPrefillFails,
    typer.Option(
        "--if-prefill-fails",
        help="When no prefill server could do its part: a decode server computes the prompt"
        " itself, or the client gets the error.",
    ),
]
Grace = Annotated[
    int,
    typer.Option(
        min=0, max=3600, metavar="SECONDS", help="Time that requests have to end after Ctrl-C."
    ),
]
LogLines = Annotated[
    LogFormat,
    typer.Option("--log-format", help="Log lines: JSON, text, or text on a terminal (auto)."),
]
