"""One request to a vLLM server: sent, and then read to its end, read as it comes, or given up.

Refuses to take an error for an answer, in whichever of its shapes it comes.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any

ANSWERS_WITHIN_S = 180.0


class RefusedError(Exception):
    """A server answered with an error.

    ``status`` is that of HTTP, and 200 where the error came in a stream; ``body`` is what it sent.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Completion:
    """What a server answered."""

    tokens: list[int]
    finish_reason: str
    params: dict[str, Any] | None
    num_cached_tokens: int


@dataclass
class Call:
    """A request that was sent; `completion` or `stream` reads it, `abort` hangs up."""

    connection: HTTPConnection

    def completion(self) -> Completion:
        """Wait for the whole answer; raises `RefusedError`."""
        try:
            answer = json.loads(self._answer().read())
        finally:
            self.connection.close()
        (choice,) = answer["choices"]
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        params = answer.get("kv_transfer_params")
        return Completion(choice["token_ids"], choice["finish_reason"], params, cached or 0)

    def stream(self) -> Iterator[int]:
        """The tokens of a request with ``stream``, as they come; raises `RefusedError`."""
        try:
            for line in self._answer():
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RefusedError(200, json.dumps(event))
                    for choice in event["choices"]:
                        yield from choice["token_ids"]
        finally:
            self.connection.close()

    def abort(self) -> None:
        """Hang up, as a client that gives up does."""
        self.connection.close()

    def _answer(self) -> HTTPResponse:
        response = self.connection.getresponse()
        if response.status != 200:
            raise RefusedError(response.status, response.read().decode(errors="replace"))
        return response


def ask(port: int, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Call:
    """Send a request to a server on loopback and do not wait for what it answers.

    ``fields`` are vLLM's own.
    """
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
        **fields,
    }
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    headers = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    return Call(connection)
