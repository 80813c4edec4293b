"""A router that moves conversations between pairs of vLLM servers, with their KV.

    python examples/moving_router.py --pair http://P0:8100,http://D0:8200 \
        --pair http://P1:8100,http://D1:8200
    curl -s http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \
        -d '{"model": "MODEL", "messages": [{"role": "user", "content": "Hello"}]}'
    curl -s -X POST http://127.0.0.1:8080/pairs/0/close

    turn 1   P0 ─ticket─▶ D0 ─▶ answer, and the ticket of its KV
    close pair 0
    turn 2   P1, with that ticket: it fetches turn 1 from D0 ─ticket─▶ D1 ─▶ answer

Each turn goes to the pair with the fewest running turns, the last pair first. docs/reuse.md
describes the servers. It is an example: no streams, no retries, one process.
"""

import hashlib
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import httpx
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

TIMEOUT_S = 600.0
MAX_TICKETS = 100_000
PARAMS = "kv_transfer_params"
WITHOUT_TICKET = {"do_remote_decode": True}


@dataclass(eq=False)
class Pair:
    """A prefill and a decode server, and the number of turns in progress there."""

    prefill: str
    decode: str
    num_running: int = 0
    is_open: bool = True

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `typer.BadParameter`."""
        urls = [url.rstrip("/") for url in text.split(",")]
        if len(urls) != 2 or not all(urlsplit(url).hostname for url in urls):
            raise typer.BadParameter(f"'{text}' is not http://PREFILL:PORT,http://DECODE:PORT")
        return cls(*urls)


@dataclass(frozen=True)
class LastTurn:
    """The pair that has the KV of a conversation, and its `kv_transfer_params`."""

    pair: Pair
    params: dict[str, Any]


class Refused(Exception):
    def __init__(self, status: int, body: Any) -> None:
        super().__init__(body)
        self.response = JSONResponse(body, status)


class Router:
    def __init__(self, pairs: Sequence[Pair], http: httpx.AsyncClient) -> None:
        self.pairs, self._http = pairs, http
        self._last: dict[str, LastTurn] = {}

    async def chat(self, request: Request) -> Response:
        """``POST /v1/chat/completions``. The header ``x-pair`` names the pair that answered."""
        try:
            body = await request.json()
            past = key_of(up_to_last_answer(body["messages"]))
        except (ValueError, TypeError, KeyError, AttributeError):
            return error(400, "the body is not a JSON object with messages")
        if body.get("stream"):
            return error(400, "no streams: vLLM puts tickets into whole answers only")
        # A ticket is for one reader, so this takes it. A client's own params are never passed on.
        last = self._last.pop(past, None)
        pair = self.choose(last.pair if last else None)
        if pair is None:
            return error(503, "all pairs are closed")
        try:
            answer = await self.answer(pair, body, last.params if last else WITHOUT_TICKET)
        except Refused as refused:
            return refused.response
        except httpx.HTTPError as failed:
            return error(502, repr(failed))
        return JSONResponse(answer, headers={"x-pair": str(self.pairs.index(pair))})

    def choose(self, last: Pair | None) -> Pair | None:
        """Return the open pair with the fewest turns; ``last`` may have one more than others."""
        is_open = [pair for pair in self.pairs if pair.is_open]
        return min(is_open, key=lambda pair: pair.num_running - (pair is last) * 1.5, default=None)

    async def answer(self, pair: Pair, body: dict[str, Any], params: Any) -> dict[str, Any]:
        """Prefill loads the KV that ``params`` name, and computes the rest; decode answers."""
        pair.num_running += 1
        try:
            prefilled = await self._post(pair.prefill, {**for_prefill(body), PARAMS: params})
            params = prefilled.get(PARAMS)
            answer = await self._post(pair.decode, {**body, PARAMS: params})
        finally:
            pair.num_running -= 1
        params = answer.pop(PARAMS, None)
        if params and len(answer["choices"]) == 1:
            said = [*body["messages"], answer["choices"][0]["message"]]
            self._last[key_of(said)] = LastTurn(pair, params)
            if len(self._last) > MAX_TICKETS:
                del self._last[next(iter(self._last))]  # its KV expires at the decode server
        return answer

    async def _post(self, server: str, body: dict[str, Any]) -> Any:
        response = await self._http.post(f"{server}/v1/chat/completions", json=body)
        if response.is_error:
            raise Refused(response.status_code, {"error": f"{server}: {response.text}"})
        return response.json()

    async def set_open(self, request: Request) -> Response:
        """``POST /pairs/0/close``: no new turns go to pair 0. ``POST /pairs/0/open`` undoes it."""
        number, state = request.path_params["number"], request.path_params["state"]
        if number >= len(self.pairs) or state not in ("open", "close"):
            return error(404, "the paths are /pairs/NUMBER/open and /pairs/NUMBER/close")
        self.pairs[number].is_open = state == "open"
        return JSONResponse([pair.is_open for pair in self.pairs])


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """Return the request of one token, which leaves the KV of the prompt."""
    left_out = ("max_completion_tokens", "min_tokens", "n")
    return {key: body[key] for key in body if key not in left_out} | {"max_tokens": 1}


def up_to_last_answer(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the part of a conversation whose KV a decode server may have."""
    ends = [at + 1 for at, message in enumerate(messages) if message.get("role") == "assistant"]
    return messages[: max(ends, default=0)]


def key_of(messages: list[dict[str, Any]]) -> str:
    """Return a digest of roles and contents: clients send no name of a conversation."""
    said = [[message.get("role"), message.get("content")] for message in messages]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status)


def app_of(pairs: Sequence[Pair]) -> Starlette:
    # vLLM closes idle connections after 5 s. A request that is sent at that moment would be lost.
    http = httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(keepalive_expiry=2.0))
    router = Router(pairs, http)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with http:
            yield

    routes = [
        Route("/v1/chat/completions", router.chat, methods=["POST"]),
        Route("/pairs/{number:int}/{state}", router.set_open, methods=["POST"]),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


def main(
    pair: Annotated[
        list[Pair], typer.Option(parser=Pair.parse, help="Prefill and decode URL; repeatable.")
    ],
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 8080,
) -> None:
    """Route chats to pairs of vLLM servers, and move conversations between the pairs."""
    uvicorn.run(app_of(pair), host="127.0.0.1", port=port)


if __name__ == "__main__":
    typer.run(main)
