"""What the proxy is told at its start: the servers behind it, limits and intervals.

Refuses a server that is not an HTTP address, or that is named twice.
"""

from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from kvbus.errors import ConfigError


class IfPrefillFails(StrEnum):
    """What becomes of a request that no prefill server could prefill."""

    DECODE = "decode"  # a decode server computes the prompt itself
    REFUSE = "refuse"  # the client gets the error


@dataclass(frozen=True)
class ProxyOptions:
    """The settings of one proxy; `ConfigError` when a server is wrong or named twice."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    health_interval_s: float = 2.0
    health_timeout_s: float = 5.0
    connect_timeout_s: float = 5.0
    release_timeout_s: float = 30.0
    max_in_flight: int = 1024
    max_releases: int = 64
    max_body_bytes: int = 64 * 2**20
    if_prefill_fails: IfPrefillFails = IfPrefillFails.DECODE

    def __post_init__(self) -> None:
        for role in ("prefill", "decode"):
            urls = tuple(base_url(role, text) for text in getattr(self, role))
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
