"""Gives back what a prefill server holds for a client that left before a decode server had it.

Refuses to wait for it: releases run beside the requests, so many at once and for so long at most.
"""

import anyio
import structlog
from anyio.abc import TaskGroup

from kvbus.errors import ErrorCode, PeerLost
from kvbus.integrations.proxy.asked import Asked
from kvbus.integrations.proxy.bodies import Params, one_token_body
from kvbus.integrations.proxy.options import ProxyOptions
from kvbus.integrations.proxy.servers import ServerPool
from kvbus.integrations.proxy.upstream import Upstream

log = structlog.get_logger()


class Releases:
    """Has a decode server load such a prompt for one token: then the prefill server is free of it.

    The contract of routers has no word for giving back; this is all of it that every pair of
    engines understands. Where it fails, the prefill server waits for the offer's expiry.
    """

    def __init__(self, options: ProxyOptions, upstream: Upstream, decode: ServerPool) -> None:
        self._options = options
        self._upstream = upstream
        self._decode = decode
        self._num_running = 0

    def start(self, tasks: TaskGroup, asked: Asked, params: Params) -> None:
        """Release ``params`` in the background, unless too many releases run already."""
        if self._num_running >= self._options.max_releases:
            self._say_left(asked, "too many releases at once")
            return
        self._num_running += 1
        tasks.start_soon(self._release, asked, params)

    async def _release(self, asked: Asked, params: Params) -> None:
        trouble = "not in time"
        try:
            with anyio.move_on_after(self._options.release_timeout_s):
                trouble = await self._try_servers(asked, params)
        finally:
            self._num_running -= 1
        if trouble:
            self._say_left(asked, trouble)

    async def _try_servers(self, asked: Asked, params: Params) -> str:
        """What went wrong, or nothing."""
        for server in self._decode.in_turn():
            call = asked.call(one_token_body(asked.body, params))
            try:
                response = await self._upstream.whole(server, call)
            except PeerLost as error:
                if error.code is ErrorCode.PEER_UNREACHABLE:
                    continue
                return error.message
            if response.is_error:
                return f"{server} answered {response.status_code}"
            request_id = asked.record.request_id
            log.info("offer.released", request_id=request_id, decode=server.url)
            return ""
        return "no decode server is healthy"

    @staticmethod
    def _say_left(asked: Asked, trouble: str) -> None:
        log.warning(
            "offer.left",
            request_id=asked.record.request_id,
            prefill=asked.record.prefill,
            trouble=trouble,
        )
