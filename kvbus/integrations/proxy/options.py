"""The options of the proxy: the servers behind it, limits and intervals.

Refuses a server that is not an HTTP address, or that is named twice.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated
from urllib.parse import urlsplit

from typer import Option

from kvbus.errors import ConfigError


class IfPrefillFails(StrEnum):
    """What becomes of a request that no prefill server could prefill."""

    DECODE = "decode"  # a decode server computes the prompt itself
    REFUSE = "refuse"  # the client gets the error


class LogFormat(StrEnum):
    """How log lines look."""

    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


@dataclass(frozen=True, kw_only=True)
class ProxyOptions:
    """The settings of one proxy; `ConfigError` when a server is wrong or named twice."""

    prefill: Annotated[
        list[str],
        Option(metavar="URL", help="A prefill server, as http://host:8100; repeat for more."),
    ]
    decode: Annotated[
        list[str],
        Option(metavar="URL", help="A decode server, as http://host:8200; repeat for more."),
    ]
    host: Annotated[str, Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int, Option(min=0, max=65535, metavar="PORT", help="The port; 0 for a free one.")
    ] = 8000
    health_interval_s: Annotated[
        float,
        Option(
            "--health-interval",
            min=0.05,
            max=3600.0,
            metavar="SECONDS",
            help="Time between two checks of a server.",
        ),
    ] = 2.0
    max_in_flight: Annotated[
        int,
        Option(min=1, max=100_000, metavar="N", help="Requests at once; one more is answered 503."),
    ] = 1024
    if_prefill_fails: Annotated[
        IfPrefillFails,
        Option(
            help="When no prefill server could do its part: a decode server computes the prompt"
            " itself, or the client gets the error."
        ),
    ] = IfPrefillFails.DECODE
    overlap: Annotated[
        bool,
        Option(
            help="Send a request to both servers at once, so that KV moves while it is computed."
            " Not before a prefill server's first ticket, nor where the site signs tickets."
        ),
    ] = False
    grace_s: Annotated[
        int,
        Option(
            "--grace",
            min=0,
            max=3600,
            metavar="SECONDS",
            help="Time that requests have to end after Ctrl-C.",
        ),
    ] = 5
    log_format: Annotated[
        LogFormat, Option(help="Log lines: JSON, text, or text on a terminal (auto).")
    ] = LogFormat.AUTO
    health_timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    release_timeout_s: float = 30.0
    max_releases: int = 64
    max_body_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        for role in ("prefill", "decode"):
            urls = [base_url(role, text) for text in getattr(self, role)]
            object.__setattr__(self, role, urls)
        given = [*self.prefill, *self.decode]
        for url in given:
            if given.count(url) > 1:
                raise ConfigError(f"the server {url} is given twice: name each once", server=url)


def base_url(role: str, text: str) -> str:
    """The address in ``text`` without a slash at its end; raises `ConfigError` that names it."""
    wrong = ConfigError(
        f"--{role} '{text}' is not the address of a server: give it as http://host:port",
        server=text,
    )
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise wrong from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise wrong
    if parts.query or parts.fragment or parts.username is not None or not text.isascii():
        raise wrong
    if any(mark.isspace() or not mark.isprintable() for mark in text):
        raise wrong
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
