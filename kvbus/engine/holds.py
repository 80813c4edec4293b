"""Tickets of requests that wait in the engine's queue."""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kvbus.engine.connection import Connection
from kvbus.engine.later import Runner
from kvbus.engine.retrying import NOT_BEGUN
from kvbus.errors import ClosedError, ErrorCode, KVBusError, RequestRefused
from kvbus.protocol.engine import HoldOffer
from kvbus.protocol.message import Empty

HOLD_AFTER_S = 0.2
"""Most requests are fetched earlier, and need no hold."""
MAX_HOLDS, MAX_HOLDS_AT_ONCE = 65_536, 16
RETRY_S = 2.0


class TicketHolds:
    """The holds of one engine, in the link's event loop; each agent gets all of them."""

    def __init__(self, runner: Runner, logger: logging.Logger) -> None:
        self._runner, self._logger = runner, logger
        self._held: dict[str, dict[str, Any]] = {}
        self._unsent: dict[str, None] = {}
        self._num_under_way = 0
        self._connection: Connection | None = None
        self._timer: asyncio.TimerHandle | None = None

    def add(self, ticket: Mapping[str, Any]) -> None:
        """Hold an offer, from any thread."""
        name = _name_of(ticket)
        if name is not None:
            with suppress(ClosedError):
                self._runner.post(partial(self._add, name, dict(ticket)))

    def remove(self, ticket: Mapping[str, Any]) -> None:
        """Remove a ticket that is fetched or released: the agent's hold ends with the fetch."""
        name = _name_of(ticket)
        if name is not None and self._held.pop(name, None) is not None:
            self._unsent.pop(name, None)

    def opened(self, connection: Connection) -> None:
        self._connection, self._num_under_way = connection, 0
        self._unsent = dict.fromkeys(self._held)
        self._send()

    def lost(self) -> None:
        self._connection = None

    def closed(self) -> None:
        self._connection, self._held, self._unsent = None, {}, {}
        self._end_pause()

    def _add(self, name: str, ticket: dict[str, Any]) -> None:
        if name not in self._held and len(self._held) < MAX_HOLDS:
            self._held[name], self._unsent[name] = ticket, None
            self._pause(HOLD_AFTER_S)

    def _send(self) -> None:
        while (
            self._connection is not None
            and self._unsent
            and self._timer is None
            and self._num_under_way < MAX_HOLDS_AT_ONCE
        ):
            name = next(iter(self._unsent))
            del self._unsent[name]
            on_reply = partial(self._on_reply, self._connection, name)
            try:
                self._connection.send(HoldOffer(self._held[name]), on_reply)
            except KVBusError:
                return  # the next agent gets all of them
            except Exception as error:  # such as a ticket that cannot be encoded
                self._drop(name, error)
            else:
                self._num_under_way += 1

    def _on_reply(self, connection: Connection, name: str, reply: Empty | KVBusError) -> None:
        if connection is not self._connection:
            return
        self._num_under_way -= 1
        if isinstance(reply, RequestRefused) and name in self._held:
            if reply.code is ErrorCode.BUSY:
                self._unsent[name] = None
                self._pause(RETRY_S)
            elif reply.code not in NOT_BEGUN:
                self._drop(name, reply)
        self._send()

    def _drop(self, name: str, error: Exception) -> None:
        del self._held[name]
        self._logger.info("kvbus: the offer of a queued request is not held: %s", error)

    def _pause(self, seconds: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._timer = None
        self._send()

    def _end_pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _name_of(ticket: Mapping[str, Any]) -> str | None:
    name = ticket.get("transfer_id", ticket.get("offer_id"))
    return name if isinstance(name, str) else None
