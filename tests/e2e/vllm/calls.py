"""One request to a vLLM server: sent, and then read to its end, read as it comes, or given up.

Refuses to take an error for an answer, in whichever of its shapes it comes.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPResponse
from typing import Any

ANSWERS_WITHIN_S = 180.0
COMMON = {"model": "model", "temperature": 0, "ignore_eos": True, "return_token_ids": True}


class RefusedError(Exception):
    """A server answered with an error; ``status`` is 200 where the error came in a stream."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body}")
        self.status = status


@dataclass(frozen=True)
class Completion:
    """What a server answered."""

    tokens: list[int]
    params: dict[str, Any] | None


@dataclass
class Call:
    """A request that was sent: its answer is read as one of these, which raise `RefusedError`."""

    connection: HTTPConnection

    def completion(self) -> Completion:
        """The whole answer."""
        answer = self.whole()
        (choice,) = answer["choices"]
        return Completion(choice["token_ids"], answer.get("kv_transfer_params"))

    def sequences(self) -> list[list[int]]:
        """The tokens of each choice of the whole answer, in order."""
        choices = sorted(self.whole()["choices"], key=lambda one: one["index"])
        return [choice["token_ids"] for choice in choices]

    def stream(self) -> Iterator[int]:
        """The tokens of a request with ``stream``, as they come."""
        try:
            for line in self._answer():
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RefusedError(200, json.dumps(event))
                    for choice in event["choices"]:
                        yield from choice.get("token_ids") or ()
        finally:
            self.connection.close()

    def abort(self) -> None:
        """Hang up, as a client that gives up does."""
        self.connection.close()

    def read(self) -> bytes:
        """The answer as it came."""
        try:
            return self._answer().read()
        finally:
            self.connection.close()

    def whole(self) -> Any:
        """The answer as it is."""
        return json.loads(self.read())

    def _answer(self) -> HTTPResponse:
        response = self.connection.getresponse()
        if response.status != 200:
            raise RefusedError(response.status, response.read().decode(errors="replace"))
        return response


def ask(
    port: int,
    prompt: Any,
    num_tokens: int,
    *,
    headers: Mapping[str, str] | None = None,
    **fields: Any,
) -> Call:
    """Send a request to a server on loopback and do not wait for what it answers.

    ``fields`` are vLLM's own.
    """
    asked = {"prompt": prompt, "max_tokens": num_tokens, "detokenize": False, **fields}
    return _send(port, "/v1/completions", asked, headers or {})


def ask_in_words(
    port: int, prompts: Sequence[Sequence[int]], num_tokens: int, **fields: Any
) -> Call:
    """As `ask`, by the words of the models' tokenizer: of one prompt, or of several."""
    words = [words_of(prompt) for prompt in prompts]
    prompt = words if len(words) > 1 else words[0]
    return ask(port, prompt, num_tokens, detokenize=True, **fields)


def chat(port: int, prompt: Sequence[int], num_tokens: int, **fields: Any) -> Call:
    """As `ask`, as a chat whose only message is ``prompt``."""
    return converse(port, [user_says(prompt)], num_tokens, **fields)


def converse(
    port: int, messages: Sequence[Mapping[str, str]], num_tokens: int, **fields: Any
) -> Call:
    """As `chat`, of several messages."""
    asked = {"messages": messages, "max_tokens": num_tokens, **fields}
    return _send(port, "/v1/chat/completions", asked, {})


def user_says(prompt: Sequence[int]) -> dict[str, str]:
    """A message of a chat."""
    return {"role": "user", "content": words_of(prompt)}


def words_of(prompt: Sequence[int]) -> str:
    """A prompt as the tokenizer of the models reads it."""
    return " ".join(f"t{token}" for token in prompt)


def post(port: int, path: str, fields: Mapping[str, Any]) -> None:
    """Have a server do something; raises `RefusedError` if it does not."""
    _send(port, path, fields, {}).read()


def _send(port: int, path: str, fields: Mapping[str, Any], more: Mapping[str, str]) -> Call:
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWERS_WITHIN_S)
    headers = {"Content-Type": "application/json", "Connection": "close", **more}
    connection.request("POST", path, json.dumps({**COMMON, **fields}), headers)
    return Call(connection)
