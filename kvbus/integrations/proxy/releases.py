"""Gives back what a prefill server holds for a client that left before a decode server had it."""

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.errors import ErrorCode, PeerLost
from kvbus.integrations.proxy.bodies import ClientRequest, TransferParams
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.upstream import Upstream

log = structlog.get_logger()


class TicketReleases:
    """Has a decode server load such a prompt for one token: then the prefill server is free of it.

    The contract of routers has no word for giving back; this is all of it that every pair of
    engines understands. Where it fails, the prefill server waits for the offer's expiry. Releases
    run in ``tasks`` beside the requests, so many at once and for so long at most.
    """

    def __init__(self, options: ProxyOptions, upstream: Upstream) -> None:
        self._options, self._upstream = options, upstream
        self._num_running = 0
        self.tasks: TaskGroup | None = None

    def start(self, request: ClientRequest, params: TransferParams) -> None:
        """Release ``params``, unless too many releases run already, or the proxy ends."""
        if self._num_running >= self._options.max_releases:
            _log_left(request, "too many releases at once")
        elif self.tasks is not None:
            self._num_running += 1
            self.tasks.start_soon(self._release, request, params)

    async def _release(self, request: ClientRequest, params: TransferParams) -> None:
        trouble = "not in time"
        try:
            with anyio.move_on_after(self._options.release_timeout_s):
                trouble = await self._try_servers(request, params)
        finally:
            self._num_running -= 1
        if trouble:
            _log_left(request, trouble)

    async def _try_servers(self, request: ClientRequest, params: TransferParams) -> str:
        """What went wrong, or nothing."""
        for server in self._upstream.decode.in_turn():
            try:
                response = await self._upstream.whole(server, request.for_one_token(params))
            except PeerLost as error:
                if error.code is ErrorCode.PEER_UNREACHABLE:
                    continue
                return error.message
            if response.is_error:
                return f"{server} answered {response.status_code}"
            request_id = request.record.request_id
            log.info("offer.released", request_id=request_id, decode=server.url)
            return ""
        return "no decode server is healthy"


def _log_left(request: ClientRequest, trouble: str) -> None:
    record = request.record
    log.warning("offer.left", request_id=record.request_id, prefill=record.prefill, trouble=trouble)
