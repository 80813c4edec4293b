"""Addresses of the agents beside prefill servers, from their bootstrap servers."""

from asyncio import new_event_loop, run_coroutine_threadsafe
from collections.abc import Mapping
from concurrent.futures import Future
from threading import Thread
from time import monotonic

import msgspec
from aiohttp import ClientSession, ClientTimeout, web
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, PrefillServerInfo

from kvbus.engine import query_agent
from kvbus.errors import KVBusError
from kvbus.integrations.sglang.options import Options

PLACE = "/kvbus"
PLACE_TIMEOUT_S = 5.0
RETRY_PLACE_AFTER_S = 1.0


class AgentPlace(msgspec.Struct):
    endpoint: str
    server_key: str = ""
    http_port: int | None = None


class PlaceRequest:
    def __init__(self, bootstrap_addr: str, answer: Future[AgentPlace]) -> None:
        self._bootstrap_addr, self._ended_at = bootstrap_addr, 0.0
        self._place: AgentPlace | None = None
        self._error = ""
        answer.add_done_callback(self._note_end)

    def _note_end(self, answer: Future[AgentPlace]) -> None:
        error, self._ended_at = answer.exception(), monotonic()
        if error is None:
            self._place = answer.result()
        else:
            self._error = str(error) or type(error).__name__

    @property
    def may_retry(self) -> bool:
        return bool(self._error) and monotonic() - self._ended_at > RETRY_PLACE_AFTER_S

    def place(self) -> AgentPlace | None:
        """Return None before the answer; raise `KVBusError` if the request failed."""
        if self._error:
            raise KVBusError(
                f"the bootstrap server {self._bootstrap_addr} does not name its agent: "
                f"{self._error}; start that server with --disaggregation-transfer-backend kvbus, "
                "and its agent"
            )
        return self._place


class Places(dict[str, PlaceRequest]):
    """Requests by bootstrap address; a response also goes to SGLang's ``info_table``."""

    def __init__(self, info_table: Mapping[str, PrefillServerInfo]) -> None:
        self._info_table, self._loop = info_table, new_event_loop()
        Thread(target=self._loop.run_forever, name="kvbus-places", daemon=True).start()

    def request(self, bootstrap_addr: str) -> PlaceRequest:
        request = self.get(bootstrap_addr)
        if request is None or request.may_retry:
            answer = run_coroutine_threadsafe(self._place_at(bootstrap_addr), self._loop)
            request = self[bootstrap_addr] = PlaceRequest(bootstrap_addr, answer)
        return request

    async def _place_at(self, bootstrap_addr: str) -> AgentPlace:
        timeout = ClientTimeout(total=PLACE_TIMEOUT_S)
        async with (
            ClientSession(timeout=timeout, raise_for_status=True) as session,
            session.get(f"http://{bootstrap_addr}{PLACE}") as response,
        ):
            place = msgspec.json.decode(await response.read(), type=AgentPlace)
        if (info := self._info_table.get(bootstrap_addr)) is not None:
            info.prefill_http_port = place.http_port
        return place


class BootstrapServer(CommonKVBootstrapServer):
    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(PLACE, self._reply_with_place)

    async def _reply_with_place(self, _: web.Request) -> web.Response:
        try:
            agent = await query_agent(Options.of_environment().attach)
        except KVBusError as error:
            return web.Response(text=f"no agent: {error.message}", status=503)
        place = AgentPlace(agent.peer_endpoint, agent.server_key, self.prefill_http_port)
        return web.json_response(msgspec.to_builtins(place))
