"""Asks the HTTP port of an agent what it does now."""

import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from urllib.parse import urlsplit

import msgspec

from kvbus.errors import ConfigError, PeerLost
from kvbus.protocol.status import Live

MAX_BYTES = 16 << 20


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """None: the answer is the redirect, an `HTTPError`."""


@dataclass(frozen=True, slots=True)
class HttpAgent:
    """One agent, and the token that it asks for."""

    url: str
    token: str = ""

    @classmethod
    def at(cls, address: str, token: str = "") -> "HttpAgent":
        """By HOST:PORT or http://HOST:PORT; raises `ConfigError`."""
        url = address if "://" in address else f"http://{address}"
        parts = urlsplit(url)
        try:
            is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port
        except ValueError:
            is_address = False
        if not is_address or parts.path.strip("/"):
            raise ConfigError(f"'{address}' is not HOST:PORT of an agent's http_bind")
        return cls(url.rstrip("/"), token)

    def look(self, *, timeout_s: float) -> Live:
        """What it says now; raises `PeerLost` that says why there is nothing."""
        wanted = urllib.request.Request(f"{self.url}/live")  # noqa: S310 - http or https
        # Neither a proxy nor the target of a redirect is shown the token.
        direct = urllib.request.build_opener(_NoRedirects, urllib.request.ProxyHandler({}))
        if self.token:
            wanted.add_header("Authorization", f"Bearer {self.token}")
        try:
            with direct.open(wanted, timeout=timeout_s) as answer:
                return msgspec.json.decode(answer.read(MAX_BYTES), type=Live)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read(1000).decode(errors="replace").strip()
            raise PeerLost(f"{error.code}: {said}") from error
        except urllib.error.URLError as error:
            raise PeerLost(f"no answer: {error.reason}") from error
        except (OSError, HTTPException) as error:
            raise PeerLost(f"no answer: {error}") from error
        except msgspec.MsgspecError as error:
            raise PeerLost(f"this is no kvbus agent of this version: {error}") from error
