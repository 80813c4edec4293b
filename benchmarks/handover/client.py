"""HTTP to one vLLM server over one kept-alive connection, with the times of what comes back.

Refuses to judge: a status that is not 200 is an error with the server's words.
"""

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any

TIMEOUT_S = 300.0
KEEP_ALIVE_S = 600
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


class RequestFailed(Exception):
    """A server did not answer a request as it should."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """One answer of a prefill server; times are of `time.perf_counter`."""

    sent_s: float
    received_s: float
    kv_transfer_params: dict[str, Any] | None
    token: int


@dataclass(slots=True)
class Streamed:
    """One streamed answer: when each piece came, and how many tokens or which ones it had."""

    sent_s: float
    at_s: list[float] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)

    @property
    def all_tokens(self) -> list[int]:
        """The tokens, if they were asked for."""
        return [token for piece in self.tokens for token in piece]


class Client:
    """One connection to the server at ``port``; not for several threads."""

    def __init__(self, port: int, model: str) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
        self._model = json.dumps(model)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def get(self, path: str) -> str:
        """The body of a page."""
        self._connection.request("GET", path)
        return self._answer().read().decode()

    def prefill(self, prompt: str, *, offer: bool, transfer_id: str | None = None) -> Prefilled:
        """Have a JSON list of token ids computed, and one token; ``offer`` its KV to a reader.

        Who knows ``transfer_id`` may read it while it is computed.
        """
        params = OFFER if transfer_id is None else OFFER | {"transfer_id": transfer_id}
        extra: dict[str, Any] = {"kv_transfer_params": params} if offer else {}
        body = self._body(prompt, extra | {"max_tokens": 1, "return_token_ids": True})
        sent_s = time.perf_counter()
        self._post(body)
        answer = self._answer().read()
        received_s = time.perf_counter()
        told = json.loads(answer)
        (token,) = told["choices"][0]["token_ids"]
        return Prefilled(sent_s, received_s, told.get("kv_transfer_params"), token)

    def stream(
        self,
        prompt: str,
        num_tokens: int,
        *,
        params: dict[str, Any] | None = None,
        with_tokens: bool = False,
        until: Any = None,
    ) -> Streamed:
        """Stream ``num_tokens`` tokens, or fewer once the event ``until`` is set."""
        extra: dict[str, Any] = {"max_tokens": num_tokens, "stream": True, "ignore_eos": True}
        extra |= {"kv_transfer_params": params} if params is not None else {}
        extra |= {"return_token_ids": True} if with_tokens else {}
        body = self._body(prompt, extra)
        streamed = Streamed(time.perf_counter())
        self._post(body)
        answer = self._answer()
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            streamed.at_s.append(time.perf_counter())
            piece = json.loads(line[6:])
            if "error" in piece:
                raise RequestFailed(f"the server sent an error in a stream: {line.decode()}")
            streamed.tokens.append(piece["choices"][0].get("token_ids") or [])
            if until is not None and until.is_set():
                self.close()
                return streamed
        if not streamed.at_s:
            raise RequestFailed("a stream ended without a token")
        return streamed

    def _body(self, prompt: str, extra: dict[str, Any]) -> bytes:
        fixed = {"temperature": 0, "detokenize": False, **extra}
        return f'{{"model":{self._model},"prompt":{prompt},{json.dumps(fixed)[1:]}'.encode()

    def _post(self, body: bytes) -> None:
        self._connection.request(
            "POST", "/v1/completions", body, {"Content-Type": "application/json"}
        )

    def _answer(self) -> http.client.HTTPResponse:
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RequestFailed(f"status {answer.status}: {answer.read().decode()[:500]}")
        return answer
