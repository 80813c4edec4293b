"""The agent that is replaced: asked by its successor, it has its engines go over, and ends then.

Refuses while an engine would lose something by it. It goes on as before when its successor ends.

    serving ──hand_over──▶ serving ──taken_over──▶ replaced ──▶ last session left, or deadline
       ▲                                              │
       └───────── the successor's connection ends ────┘
"""

from collections.abc import Iterable
from typing import Any

import anyio
import structlog

from kvbus.agent.engines.directory import EngineDirectory
from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.http.port import HttpPort
from kvbus.agent.process.identity import AgentIdentity
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.memory.attach import AttachConnection, AttachServer, PassingAnswer
from kvbus.memory.attach.path import AttachPlace
from kvbus.protocol.handover import HandedOver, HandOver, TakenOver
from kvbus.protocol.message import Empty, from_body, to_body

log = structlog.get_logger()

OPS = (HandOver.op, TakenOver.op)
Answer = dict[str, Any] | PassingAnswer


class Handover:
    """What an agent does for a successor; ``successor`` is that one's boot id, empty before.

    ``changed`` is set, and made anew, when one has taken over, when it has ended, and when the last
    session of an engine has left.
    """

    def __init__(
        self,
        identity: AgentIdentity,
        engines: EngineDirectory,
        attach: AttachServer,
        page: HttpPort,
    ) -> None:
        self._identity, self._engines, self._attach, self._page = identity, engines, attach, page
        self._asking: dict[AttachConnection, str] = {}
        self._taker: AttachConnection | None = None
        self.changed = anyio.Event()
        self.refusal = ""
        """Why it hands over to nobody now; empty when it does."""
        self.is_ending = False
        """Whether it ends, whatever becomes of a successor."""

    @property
    def successor(self) -> str:
        """The boot id of the agent that has taken over, empty when there is none."""
        return self._asking.get(self._taker, "") if self._taker is not None else ""

    @property
    def is_left(self) -> bool:
        """Whether a successor has taken over, and no engine has a session here."""
        return self._taker is not None and not self._engines.num_processes

    async def answer(self, connection: AttachConnection, message: dict[str, Any]) -> Answer:
        """Answer one message of a successor; raises the `KVBusError` that refuses it."""
        op, body = message.get("op"), message.get("body")
        if not isinstance(body, dict):
            raise ProtocolError("attach message needs 'op' and a map 'body'")
        if op == HandOver.op:
            return self._hand_over(connection, from_body(HandOver, body))
        return await self._be_replaced(connection)

    def on_closed(self, connection: AttachConnection) -> None:
        """A connection of the attach socket has ended: an engine's, or a successor's."""
        boot, place = self._asking.pop(connection, None), self._attach.place
        if self.is_ending:
            return
        if boot is not None and place is not None and connection.has_ended:
            place.listen()  # it may have done so, and its process is gone
            if connection is self._taker:
                self._resume(boot, place)
        elif self.is_left:
            self._change()

    async def left(self, within_s: float) -> None:
        """Return when a successor has taken over, and the engines are gone, or had time to go."""
        while True:
            while not self.successor:
                await self.changed.wait()
            with anyio.move_on_after(within_s):
                while self.successor and not self.is_left:
                    await self.changed.wait()
            if self.successor:
                return

    async def resumed(self) -> None:
        """Return when there is no successor any more."""
        while self.successor:
            await self.changed.wait()

    def _hand_over(self, connection: AttachConnection, asked: HandOver) -> PassingAnswer:
        ours, place = self._identity, self._attach.place
        if (asked.agent_id, asked.role) != (ours.agent_id, ours.role):
            raise LocalError(
                f"here is the {ours.role} agent '{ours.agent_id}', not the {asked.role} agent "
                f"'{asked.agent_id}': an agent is replaced by one of its own name and role",
                code=ErrorCode.INVALID,
            )
        if place is None or self._asking:  # each calls `listen`: the last one would be seen
            raise LocalError("another successor has asked before", code=ErrorCode.BUSY)
        if self.refusal:
            raise LocalError(self.refusal, code=ErrorCode.BUSY)
        _check_all_follow(self._engines.engines.values())
        self._asking[connection] = asked.agent_boot
        answer = HandedOver(agent_boot=ours.boot, peer_endpoint=ours.peer_endpoint)
        return PassingAnswer(to_body(answer), place.fds())

    async def _be_replaced(self, connection: AttachConnection) -> dict[str, Any]:
        boot, place = self._asking.get(connection), self._attach.place
        if boot is None or place is None or self._taker is not None:
            raise ProtocolError("ask with hand_over first, and once")
        await self._page.stop()
        self._taker, place.is_shared = connection, True
        self._attach.pause()
        log.info("agent.replacing", successor=boot, num_sessions=self._engines.num_processes)
        self._engines.send_on()
        self._change()
        return to_body(Empty())

    def _resume(self, boot: str, place: AttachPlace) -> None:
        log.warning("agent.resumed", successor=boot)
        self._taker, self._engines.is_replaced, place.is_shared = None, False, False
        self._attach.resume()
        self._page.serve_again()
        self._change()

    def _change(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


def _check_all_follow(engines: Iterable[LocalEngine]) -> None:
    reasons = {engine.engine_id: engine.stays_because for engine in engines}
    staying = [f"'{name}' stays: {reasons[name]}" for name in sorted(reasons) if reasons[name]]
    if staying:
        raise KVBusError(
            f"{'; '.join(staying)}. Nothing was changed. End these engines first; or stop the "
            "agent and start it without --replace, with the same peer_bind: what it has under way "
            "fails then, and engines whose sessions reconnect go on",
            code=ErrorCode.INCOMPATIBLE,
        )
