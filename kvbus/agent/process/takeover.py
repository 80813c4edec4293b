"""The successor of an agent: it has started, and asks the one that runs for its place.

Refuses to wait for an agent that does not answer, and to go on when it was told no.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
import structlog

from kvbus.errors import ConfigError, ErrorCode, PeerLost, ProtocolError, RequestRefused
from kvbus.memory.attach import wire
from kvbus.memory.attach.channel import FrameChannel, close_fds
from kvbus.memory.attach.connect import connect_to_agent
from kvbus.memory.attach.identity import PeerIdentity
from kvbus.memory.attach.path import AttachPlace
from kvbus.protocol.handover import HandOver, TakenOver
from kvbus.protocol.message import Message, Request, read_reply, to_body

log = structlog.get_logger()

ANSWER_WITHIN_S = 5.0
ASK_AGAIN_S = 0.5

M = TypeVar("M", bound=Message)


@dataclass(slots=True)
class Predecessor:
    """The agent whose place was taken; it has not ended while ``is_there``.

    ``peer_endpoint`` is where its tickets lead to until then.
    """

    boot: str
    peer_endpoint: str
    place: AttachPlace
    channel: FrameChannel
    is_there: bool = True

    async def watch(self) -> None:
        """Return when it has ended: the place is this agent's alone then."""
        try:
            _, fds = await self.channel.receive()
            close_fds(fds)  # who speaks unasked is as good as gone
        except (anyio.EndOfStream, ProtocolError):
            pass
        self.is_there = self.place.is_shared = False
        log.info("predecessor.ended", predecessor=self.boot)

    def close(self) -> None:
        """Hang up: if it is there yet, it takes its place again."""
        self.channel.close()


async def take_over(path: Path, wanted: HandOver, *, within_s: float) -> Predecessor | None:
    """Have the agent at ``path`` hand over; None when there is none.

    One that still waits for the end of its own predecessor is asked again for ``within_s``. Raises
    `ConfigError` when it does not hand over; it goes on as before.
    """
    deadline = anyio.current_time() + within_s
    while True:
        try:
            channel, who = _connect(path)
        except PeerLost:
            return None
        try:
            return await _ask_for_place(channel, path, wanted)
        except RequestRefused as error:
            channel.close()
            if error.code is not ErrorCode.BUSY or anyio.current_time() >= deadline:
                raise ConfigError(f"{who} does not hand over: {_explained(error)}") from error
            log.info("agent.waiting", reason=error.message)
        except TimeoutError as error:
            channel.close()
            raise ConfigError(
                f"{who} has not answered within {ANSWER_WITHIN_S:g} s: is it stopped? Wake it "
                "(kill -CONT) and replace it then, or end it and start without --replace"
            ) from error
        except (anyio.EndOfStream, ProtocolError, OSError) as error:
            channel.close()
            raise ConfigError(f"{who} hung up while it handed over: start again") from error
        await anyio.sleep(ASK_AGAIN_S)


def _connect(path: Path) -> tuple[FrameChannel, str]:
    """A connection, and who is at its other end; raises `PeerLost` and `ConfigError`."""
    try:
        connected = connect_to_agent(path)
    except RequestRefused as error:
        raise ConfigError(
            f"the agent at {path} takes no connection: is it stopped? Wake it (kill -CONT) and "
            "replace it then, or end it and start without --replace"
        ) from error
    pid = PeerIdentity.of(connected).pid
    return FrameChannel(connected), f"the agent at {path} (process {pid})"


# The order is what keeps every engine with exactly one of the two:
#
#     successor                      agent
#     hand_over ───────────────────▶ nothing changes
#               ◀── ok, socket, lock
#     listen(): who connects from here on sees this process at the other end
#     taken_over ──────────────────▶ accepts those who connected before, then nobody
#               ◀──────────────── ok
#     accept()
async def _ask_for_place(channel: FrameChannel, path: Path, wanted: HandOver) -> Predecessor:
    body, fds = await _ask(channel, wanted)
    try:
        handed = read_reply(wanted, body)
        if len(fds) != 2:
            raise ProtocolError("a place comes with 2 descriptors")
        place = AttachPlace.of_fds(path, fds)
    finally:
        close_fds(fds)
    place.is_shared = True
    try:
        place.listen()
        _, fds = await _ask(channel, TakenOver())
        close_fds(fds)
    except BaseException:
        place.__exit__()
        raise
    return Predecessor(handed.agent_boot, handed.peer_endpoint, place, channel)


async def _ask(channel: FrameChannel, message: Request[M]) -> tuple[dict[str, Any], list[int]]:
    """Raises `TimeoutError`, what `FrameChannel` raises, and `RequestRefused`."""
    with anyio.fail_after(ANSWER_WITHIN_S):
        await channel.send(wire.encode_frame({"op": message.op, "body": to_body(message)}))
        body, fds = await channel.receive()
    try:
        return wire.open_reply(wire.decode_body(body)), fds
    except BaseException:
        close_fds(fds)
        raise


def _explained(error: RequestRefused) -> str:
    if error.code is ErrorCode.UNKNOWN_OP:
        return "it is of a version that cannot; stop it, and start without --replace"
    return error.message
