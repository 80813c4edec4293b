"""The line between driver and engine: JSON lines over a Unix socket, and what they say."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from kvbus.demo.model_config import ModelConfig
from kvbus.demo.options import EngineShape
from kvbus.errors import ErrorCode, ProtocolError
from kvbus.protocol.engine import StageTimes

MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Step:
    """One generated token; ``digest`` is the blake2b of the float32 logits that it came from.

    It also shows an error that is too small to change the token.
    """

    token: int
    digest: str


class EngineSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is told when it starts; ``flip_one_byte`` is a fault, for a negative control.

    The caches are as large as ``concurrency`` requests need, each of ``max_tokens`` at most, so
    that all blocks are reused. A ring of host blocks, if the engine has one, is ``ring_share`` of
    that. A prefill engine computes ``prefill_chunk`` tokens before it offers them, None: all.
    """

    engine_id: str
    attach_path: str
    model: ModelConfig
    shape: EngineShape
    concurrency: int
    max_tokens: int
    prefill_chunk: int | None
    ring_share: float
    flip_one_byte: bool


class DemoMessage(msgspec.Struct, frozen=True, tag=True):
    """What both ends say of one request; of none where ``request_id`` is empty."""

    request_id: str


class Prefill(DemoMessage, frozen=True):
    """Compute a prompt, offer its KV, and answer `Offered` and `Prefilled`."""

    prompt: str


class Decode(DemoMessage, frozen=True):
    """Fetch the KV of ``num_tokens`` tokens, await `FirstToken`, generate, answer `Decoded`."""

    ticket: dict[str, Any]
    num_tokens: int
    num_steps: int


class FirstToken(DemoMessage, frozen=True):
    """What a request's `Decode` goes on from. It has no answer."""

    token: int


class Settle(DemoMessage, frozen=True):
    """Answer `Settled` once every block is free again, or none has come back for a while."""


class Ready(DemoMessage, frozen=True):
    """The engine is registered; ``agent_endpoint`` is the peer socket of its agent."""

    agent_endpoint: str


class Offered(DemoMessage, frozen=True):
    """The ticket of the offer; of a chunked prefill, it comes before there is any KV."""

    ticket: dict[str, Any]


class Prefilled(DemoMessage, frozen=True):
    """All KV is computed, in ``num_blocks`` blocks, and the first token is known.

    ``computed_at_s`` is when the last of it was, by the machine's monotonic clock.
    """

    step: Step
    num_blocks: int
    computed_at_s: float


class Decoded(DemoMessage, frozen=True):
    """The tokens after the first, and what the fetch took, from its call to its completion.

    ``fetched_at_s`` is when it completed, by the machine's monotonic clock.
    """

    steps: list[Step]
    num_bytes: int
    path: str
    handoff_s: float
    fetched_at_s: float
    stages_s: StageTimes


class Failed(DemoMessage, frozen=True):
    """The request ended without its KV."""

    code: ErrorCode
    message: str


class Settled(DemoMessage, frozen=True):
    """``num_blocks_held`` blocks are still not free."""

    num_blocks_held: int


NO_REQUEST = ""
Work = Prefill | Decode | FirstToken | Settle
Answer = Ready | Offered | Prefilled | Decoded | Failed | Settled
_DECODER: msgspec.json.Decoder[Work | Answer] = msgspec.json.Decoder(Work | Answer)


class Line:
    """One end: sends any message, and receives those of the other end until that closes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, end: socket.socket) -> Self:
        """The line over this end of a connection, which it closes."""
        return cls(*await asyncio.open_unix_connection(sock=end, limit=MAX_LINE_BYTES))

    def close(self) -> None:
        """Close this end; idempotent."""
        self._writer.close()

    async def send(self, message: Work | Answer) -> None:
        """Send one line; what the other end does not hear any more is dropped."""
        with suppress(OSError):
            self._writer.write(msgspec.json.encode(message) + b"\n")
            await self._writer.drain()

    async def __aiter__(self) -> AsyncIterator[Work | Answer]:
        """The lines until the end; raises `ProtocolError` for one that is no message."""
        with suppress(OSError):
            while line := await self._reader.readline():
                try:
                    yield _DECODER.decode(line)
                except msgspec.DecodeError as error:
                    raise ProtocolError(f"{line[:200]!r} is no message: {error}") from error
