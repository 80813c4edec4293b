"""A router between two kinds of engine: SGLang prefills and vLLM decodes, or the other way round.

    python examples/cross_router.py --prefill sglang=http://P:30000 --decode vllm=http://D:8000
    curl -s http://127.0.0.1:8080/generate -d '{"prompt": [1, 2, 3], "max_tokens": 16}'

    SGLang ─▶ vLLM   sends the request to both at once; SGLang's room names the offer
    vLLM ─▶ SGLang   sends it to vLLM, then vLLM's ticket and first token to SGLang

docs/mixed-engines.md has the fields. This example sends token ids only. It has no streams, log
probabilities or retries.
"""

import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

import anyio
import httpx
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

ANSWERS_WITHIN_S = 600.0
Tokens = list[int]


@dataclass(frozen=True)
class Server:
    """One server, of the command line: ``KIND=http://HOST:PORT``."""

    kind: str
    url: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises `typer.BadParameter`."""
        kind, _, url = text.partition("=")
        if kind not in ("sglang", "vllm") or not urlsplit(url).hostname:
            raise typer.BadParameter(f"{text} is not sglang=http://HOST:PORT, or vllm=…")
        return cls(kind, url.rstrip("/"))


@dataclass
class Router:
    """Both servers; ``bootstrap_port`` is that of a prefill SGLang."""

    prefill: Server
    decode: Server
    bootstrap_port: int
    http: httpx.AsyncClient

    async def from_sglang(self, body: dict[str, Any]) -> Tokens:
        """SGLang prefills, vLLM decodes."""
        host, port, room = urlsplit(self.prefill.url).hostname, self.bootstrap_port, new_room()
        agent = await self._json("GET", f"http://{host}:{port}/kvbus")
        boot = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
        rendezvous = {
            "transfer_id": f"sglang-room-{room:016x}",
            "request_id": f"room-{room}",
            **agent,
        }
        params = {"do_remote_prefill": True, "do_remote_decode": False, "rendezvous": rendezvous}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._sglang, self.prefill, body, boot)
            choice, _ = await self._vllm(self.decode, body, body["max_tokens"], params)
        tokens: Tokens = choice["token_ids"]
        return tokens

    async def from_vllm(self, body: dict[str, Any]) -> Tokens:
        """VLLM prefills, SGLang decodes."""
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        choice, params = await self._vllm(self.prefill, body, 1, params)
        if "ticket" not in params:
            raise httpx.HTTPError(f"{self.prefill.url} offers no KV: does its prefill agent run?")
        given = {"ticket": params["ticket"], "first_token": choice["token_ids"][0]}
        room = {"bootstrap_host": "kvbus", "bootstrap_room": new_room()}
        return await self._sglang(self.decode, body, room, {"custom_params": {"kvbus": given}})

    async def _sglang(
        self, server: Server, body: dict[str, Any], room: dict[str, Any], more: Any = None
    ) -> Tokens:
        sampling = {
            "max_new_tokens": body["max_tokens"],
            "temperature": body.get("temperature", 0),
            "ignore_eos": body.get("ignore_eos", False),
            **(more or {}),
        }
        fields = {"input_ids": body["prompt"], "sampling_params": sampling, **room}
        answer = await self._json("POST", f"{server.url}/generate", fields)
        tokens: Tokens = answer["output_ids"]
        return tokens

    async def _vllm(
        self, server: Server, body: dict[str, Any], max_tokens: int, params: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the sampled choice and the parameters for decode."""
        fields = {
            **{"temperature": 0, **body, "max_tokens": max_tokens, "kv_transfer_params": params},
            **{"return_token_ids": True, "detokenize": False},
        }
        answer = await self._json("POST", f"{server.url}/v1/completions", fields)
        return answer["choices"][0], answer.get("kv_transfer_params") or {}

    async def _json(self, method: str, url: str, body: Any = None) -> Any:
        answer = await self.http.request(method, url, json=body)
        if answer.is_error:
            raise httpx.HTTPError(f"{url}: {answer.status_code}: {answer.text}")
        return answer.json()


def new_room() -> int:
    """A room's number is the right to its KV: 63 random bits."""
    return secrets.randbits(63)


def app_of(route: Callable[[dict[str, Any]], Awaitable[Tokens]]) -> Starlette:
    """``POST /generate``: {prompt, max_tokens, temperature, ignore_eos} to {tokens}."""

    async def generate(request: Request) -> JSONResponse:
        try:
            body = await request.json()
            _ = body["prompt"], body["max_tokens"]
        except (ValueError, TypeError, KeyError) as error:
            message = f"the body is no JSON map with prompt and max_tokens: {error!r}"
            return JSONResponse({"error": message}, status_code=400)
        answer: dict[str, Any] = {}
        status = 200
        try:
            answer["tokens"] = await route(body)
        except* httpx.HTTPError as group:
            answer["error"] = "; ".join(map(repr, group.exceptions))
            status = 502
        return JSONResponse(answer, status_code=status)

    return Starlette(routes=[Route("/generate", generate, methods=["POST"])])


def main(
    prefill: Annotated[Server, typer.Option(parser=Server.parse, help="KIND=http://HOST:PORT")],
    decode: Annotated[Server, typer.Option(parser=Server.parse, help="KIND=http://HOST:PORT")],
    bootstrap_port: Annotated[int, typer.Option(help="Of a prefill SGLang.")] = 8998,
    port: Annotated[int, typer.Option(help="Where clients ask.")] = 8080,
) -> None:
    """Route between two kinds of engine."""
    if prefill.kind == decode.kind:
        raise typer.BadParameter("servers of one kind have routers of their own")
    anyio.run(partial(serve, prefill, decode, bootstrap_port=bootstrap_port, port=port))


async def serve(prefill: Server, decode: Server, *, bootstrap_port: int, port: int) -> None:
    """Until it is told to end."""
    async with httpx.AsyncClient(timeout=ANSWERS_WITHIN_S) as http:
        router = Router(prefill, decode, bootstrap_port, http)
        route = router.from_sglang if prefill.kind == "sglang" else router.from_vllm
        await uvicorn.Server(uvicorn.Config(app_of(route), host="127.0.0.1", port=port)).serve()


if __name__ == "__main__":
    typer.run(main)
