"""One request to a collector, as OTLP over HTTP has it.

Headers, such as those that say who we are, come from the environment, as for all that speaks OTLP.
"""

import http.client
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from enum import Enum

from kvbus.agent.http.redirects import opener
from kvbus.errors import ConfigError

TRACES_PATH = "/v1/traces"
HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
TIMEOUT_S = 10.0
TRY_AGAIN = {429, 502, 503, 504}
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")


class Answer(Enum):
    """What became of a request."""

    TAKEN = "taken"
    REFUSED = "refused"
    """It will be refused again."""
    AWAY = "away"
    """It may be taken later."""


class Collector:
    """The collector at ``endpoint``, http://HOST:PORT or with a path before that of traces."""

    def __init__(self, endpoint: str, environment: Mapping[str, str] = os.environ) -> None:
        """Raises `ConfigError` when a header of the environment cannot be sent."""
        self.url = endpoint.rstrip("/") + TRACES_PATH
        self._opener = opener()
        self._headers = {"Content-Type": "application/x-protobuf"}
        for name in HEADERS:
            self._headers |= _headers(name, environment.get(name, ""))

    def post(self, body: bytes, *, timeout_s: float = TIMEOUT_S) -> tuple[Answer, str]:
        """What became of it, and why it was not taken."""
        request = urllib.request.Request(self.url, body, self._headers)  # noqa: S310 - of the config
        try:
            with self._opener.open(request, timeout=timeout_s) as reply:
                reply.read()
        except urllib.error.HTTPError as error:
            with error:
                is_away = error.code in TRY_AGAIN
                return Answer.AWAY if is_away else Answer.REFUSED, f"HTTP status {error.code}"
        except urllib.error.URLError as error:
            return Answer.AWAY, str(error.reason)
        except (OSError, http.client.HTTPException) as error:
            return Answer.AWAY, str(error) or type(error).__name__
        return Answer.TAKEN, ""


def _headers(variable: str, text: str) -> dict[str, str]:
    """KEY=VALUE,KEY=VALUE, with percent escapes in the values; these are secrets, and not told."""
    pairs = (one.partition("=") for one in text.split(",") if "=" in one)
    headers = {key.strip(): urllib.parse.unquote(value.strip()) for key, _, value in pairs}
    for number, (key, value) in enumerate(headers.items(), 1):
        if not (_NAME.fullmatch(key) and _VALUE.fullmatch(value)):
            raise ConfigError(
                f"the environment's {variable}: header {number} cannot be sent: its name or its "
                "value has characters that HTTP does not allow there",
                key="otlp_endpoint",
            )
    return headers
