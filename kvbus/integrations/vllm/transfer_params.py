"""What routers carry between two engines: the ``kv_transfer_params`` of a request.

Refuses, with the reason, params that were not made by this connector, and a prompt that is not the
one whose KV they name. Routers need to know two keys, and pass the rest on as it is.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any

import msgspec

from kvbus.errors import ProtocolError
from kvbus.protocol.message import Readers, Secret
from kvbus.protocol.ticket import Ticket
from kvbus.protocol.trace import known_trace

ASKS_TO_OFFER = "do_remote_decode"
ASKS_TO_FETCH = "do_remote_prefill"
TICKET = "ticket"
TRANSFER_ID = "transfer_id"
READERS = "readers"
RENDEZVOUS = "rendezvous"
TRACEPARENT = "traceparent"


class HandoffParams(msgspec.Struct, frozen=True):
    """A ticket, and which tokens its KV is of.

    ``remote_num_tokens`` were computed by the engine that offers; ``prompt_digest`` is of these
    tokens and of all else that their KV depends on, see `prompt_digest`. Without ``whole_blocks``
    the first block of a window has a gap at its beginning there, too.
    """

    ticket: dict[str, Any]
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    prompt_digest: str
    whole_blocks: bool = True

    def to_params(self, *, next_turn: bool = False) -> dict[str, Any]:
        """The params of the decode request, safe to pass through any JSON.

        With ``next_turn`` those of the prefill request that goes on the conversation.
        """
        asks = {ASKS_TO_FETCH: not next_turn, ASKS_TO_OFFER: next_turn}
        return {**asks, **msgspec.to_builtins(self)}


def read_params(params: Mapping[str, Any]) -> HandoffParams:
    """What the params of a request name; raises `ProtocolError` that says what is wrong."""
    try:
        handoff = msgspec.convert(dict(params), HandoffParams)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"kv_transfer_params: {error}; pass those of the engine's response on unchanged"
        ) from error
    Ticket.from_json(handoff.ticket)
    return handoff


def read_transfer_id(params: Mapping[str, Any]) -> str | None:
    """The name that the router gives the offer, if it does; raises `ProtocolError`."""
    try:
        return msgspec.convert(params.get(TRANSFER_ID), Secret | None)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params: {TRANSFER_ID}: {error}") from error


def read_readers(params: Mapping[str, Any]) -> int:
    """How many decode requests may use the ticket, as the router says; raises `ProtocolError`."""
    try:
        return msgspec.convert(params.get(READERS, 1), Readers)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"kv_transfer_params: {READERS}: {error}") from error


def read_trace(params: Mapping[str, Any], headers: Mapping[str, str] | None) -> str:
    """The trace of a request: of its HTTP headers, or what the router says; empty for none.

    vLLM keeps the headers only where it sends spans itself (``--otlp-traces-endpoint``).
    """
    return known_trace((headers or {}).get(TRACEPARENT, ""), str(params.get(TRACEPARENT, "")))


def prompt_digest(token_ids: Sequence[int], conditions: Iterable[str]) -> str:
    """Of tokens, and of what else their KV depends on: LoRA, images.

    Equal on both sides for the same request, whatever their block sizes are.
    """
    digest = blake2b(digest_size=16)
    texts = [condition.encode(errors="surrogatepass") for condition in conditions]
    for part in (array("q", token_ids).tobytes(), *texts):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()
