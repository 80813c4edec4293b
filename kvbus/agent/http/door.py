"""Who may ask at the HTTP port: who has the token, or, where there is none, this machine.

Without a token the port is on loopback only. A page of a foreign site can have the browser of this
machine ask there, under a name of its own: so the request must name the port by its address.
"""

import base64
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbus.agent.http.answer import Answer, as_text
from kvbus.agent.process.addresses import http_address
from kvbus.agent.process.config import AgentConfig
from kvbus.agent.process.data_plane import is_loopback
from kvbus.errors import ConfigError
from kvbus.keys.files import read_private

MIN_TOKEN, MAX_TOKEN = 16, 1024

_HOST = re.compile(r"(localhost|[0-9.]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]+)?")
ASK_FOR_TOKEN = (("WWW-Authenticate", 'Basic realm="kvbus", charset="UTF-8"'),)


@dataclass(frozen=True, slots=True)
class Door:
    """Checks one request after the other; ``token`` is empty when there is none."""

    token: str = ""
    only_by_address: bool = False

    @classmethod
    def open(cls, config: AgentConfig) -> "Door":
        """What the config says; raises `ConfigError`, also for what would be open to a network."""
        if not config.http_bind:
            return cls()
        if config.http_token_file:
            return cls(_read_token(Path(config.http_token_file)))
        local = is_loopback(http_address(config.http_bind)[0])
        if not local and not config.insecure:
            raise ConfigError(
                f"key 'http_token_file': needed, because http_bind = \"{config.http_bind}\" is not "
                "loopback: other machines reach it. Write a token into a file of mode 0600, such "
                "as by 'openssl rand -hex 32', or write insecure = true",
                key="http_token_file",
            )
        return cls(only_by_address=local)

    def refusal(self, environ: Mapping[str, Any]) -> Answer | None:
        """Why the request is not answered; None when it is."""
        if self.token and not hmac.compare_digest(_shown(environ).encode(), self.token.encode()):
            return Answer(
                b"this port asks for its token (http_token_file): as 'Authorization: Bearer TOKEN',"
                b" or as the password of any user\n",
                status="401 Unauthorized",
                headers=ASK_FOR_TOKEN,
            )
        if self.only_by_address and not _is_local(str(environ.get("HTTP_HOST", ""))):
            return as_text(
                "ask by the address of this machine, such as 127.0.0.1, or localhost: other names "
                "need a token (http_token_file)",
                "403 Forbidden",
            )
        return None


def _read_token(path: Path) -> str:
    try:
        token = read_private(path).decode(errors="replace").strip()
    except ConfigError as error:
        message = f"key 'http_token_file': {error.message}"
        raise ConfigError(message, key="http_token_file") from error
    if not MIN_TOKEN <= len(token) <= MAX_TOKEN or not token.isascii() or not token.isprintable():
        raise ConfigError(
            f"key 'http_token_file': {path} has no token: one line of {MIN_TOKEN} to {MAX_TOKEN} "
            "printable characters",
            key="http_token_file",
        )
    return token


def _shown(environ: Mapping[str, Any]) -> str:
    """The token that a request shows, as a bearer's or as a password."""
    scheme, _, value = str(environ.get("HTTP_AUTHORIZATION", "")).partition(" ")
    if scheme.lower() == "bearer":
        return value.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except ValueError:  # not Base64, or not ASCII or UTF-8
        return ""


def _is_local(host: str) -> bool:
    """Whether a Host header has this machine's name or an address of it."""
    named = _HOST.fullmatch(host)
    return named is not None and is_loopback(named[1])
