"""One request to a collector, as OTLP over HTTP has it.

Headers, such as those that say who we are, come from the environment, as for all that speaks OTLP.
"""

import http.client
import os
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from enum import Enum

TRACES_PATH = "/v1/traces"
HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")
TIMEOUT_S = 10.0
TRY_AGAIN = {429, 502, 503, 504}


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
        self.url = endpoint.rstrip("/") + TRACES_PATH
        self._headers = {"Content-Type": "application/x-protobuf"}
        for name in HEADERS:
            self._headers |= _headers(environment.get(name, ""))

    def post(self, body: bytes, *, timeout_s: float = TIMEOUT_S) -> tuple[Answer, str]:
        """What became of it, and why it was not taken."""
        request = urllib.request.Request(self.url, body, self._headers)  # noqa: S310 - of the config
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:  # noqa: S310 - as above
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


def _headers(text: str) -> dict[str, str]:
    """KEY=VALUE,KEY=VALUE, with percent escapes in the values."""
    pairs = (one.partition("=") for one in text.split(",") if "=" in one)
    return {key.strip(): urllib.parse.unquote(value.strip()) for key, _, value in pairs}
