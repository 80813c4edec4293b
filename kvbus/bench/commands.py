"""What the benchmark tells its prefill engine's process, and what that answers."""

from typing import Any, ClassVar

from kvbus.protocol.message import Empty, Message, Request


class BenchTickets(Message, frozen=True):
    """The ticket of each request that is offered now, by request id."""

    tickets: dict[str, dict[str, Any]]


class BenchEnded(Message, frozen=True):
    """By offer id, when it was ready and when it was released, as `perf_counter`."""

    times: dict[str, tuple[float, float]]


class OpenEngine(Request[Empty], frozen=True):
    """Attach an engine with a cache full of the pattern."""

    op: ClassVar[str] = "open"

    engine_id: str
    shape: str
    num_blocks: int


class CloseEngine(Request[Empty], frozen=True):
    """End an engine."""

    op: ClassVar[str] = "close"

    engine_id: str


class OfferRequests(Request[BenchTickets], frozen=True):
    """Offer several requests at once, as after one step: tokens and blocks by request id."""

    op: ClassVar[str] = "offer"

    engine_id: str
    requests: dict[str, tuple[int, list[int]]]


class SaveRequest(Request[BenchTickets], frozen=True):
    """Offer a request that is saved into the ring meanwhile."""

    op: ClassVar[str] = "save"

    engine_id: str
    request_id: str
    blocks: list[int]
    num_tokens: int


class ComputeRequest(Request[BenchTickets], frozen=True):
    """Offer a request whose tokens become ready in chunks, one every ``chunk_s``."""

    op: ClassVar[str] = "compute"

    engine_id: str
    request_id: str
    blocks: list[int]
    num_tokens: int
    num_chunks: int
    chunk_s: float


class AwaitEnded(Request[BenchEnded], frozen=True):
    """Wait until no offer is live; tells of those that ended since they were last told."""

    op: ClassVar[str] = "settle"

    engine_id: str
