"""Loads of a decode engine, in the scheduler's thread: nothing blocks.

A load is over once nothing can write into its blocks.
"""

import logging
import time
import uuid
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import msgspec

from kvbus.engine import Fetch, Link, Rendezvous
from kvbus.errors import ErrorCode, KVBusError, LocalError, ProtocolError
from kvbus.integrations.vllm.offers import BlockIds, Tables, tables_of
from kvbus.integrations.vllm.params import (
    RENDEZVOUS,
    ConnectorOptions,
    Description,
    HandoffParams,
    adapter_of,
    digest_of,
    has_tokens,
    images_of,
    is_of_later_prompt,
    read_params,
    read_trace,
)
from kvbus.integrations.vllm.stats import LOADS, LOADS_FAILED, REFUSED_AT, KvbusStats
from kvbus.integrations.vllm.steps import Steps
from kvbus.protocol.engine import Outcome
from kvbus.protocol.message import MAX_PRIORITY, MIN_PRIORITY

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbus")

MOST_TICKETS = 4096
"""Tickets with a known reader. The prefill agent reports older ones as used."""


class OtherImagesError(ProtocolError):
    """The request lacks images of its ticket's prompt."""


@dataclass(slots=True, eq=False)
class Load:
    """A load of the first ``num_tokens`` tokens of a prompt.

    Without ``handoff``, the load fails for ``problem``. ``partial`` blocks may have a gap at their
    beginning, in front of a window.
    """

    request_id: str
    num_tokens: int
    handoff: HandoffParams | None
    problem: str = ""
    lacks_images: bool = False
    priority: int = 0
    traceparent: str = ""
    first_token: int = 0
    min_tokens: int = 1
    fetch_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    seen_at: float = field(default_factory=time.monotonic)
    is_given_up: bool = False
    has_ended: bool = False
    has_failed: bool = False
    partial: set[int] = field(default_factory=set)
    gapped: set[int] = field(default_factory=set)
    ticket_key: bytes = field(init=False, default=b"")
    """Digest of the whole ticket: an altered one has another key."""

    def __post_init__(self) -> None:
        if self.handoff is not None:  # once: some have tens of kilobytes
            ticket = msgspec.json.encode(self.handoff.ticket)
            self.ticket_key = blake2b(ticket, digest_size=16).digest()

    def name(self) -> str:
        elsewhere = self.handoff.ticket.get("request_id") if self.handoff is not None else None
        also = f"{elsewhere!r} in the prefill vLLM, " if elsewhere else ""
        return f"request {self.request_id} ({also}fetch {self.fetch_id})"


# Several requests may have one ticket. A router may pass on `n`, of which vLLM makes a request for
# each sequence, or may send a request again. The first one that vLLM looks up loads the KV. The
# others wait until vLLM computes that one. Then the prefix cache has what it loaded, and the others
# compute the rest.
class Loads:
    def __init__(
        self,
        described: Description,
        link: Link,
        stats: KvbusStats,
        options: ConnectorOptions,
        steps: Steps,
        *,
        num_left: int,
        zeroes_blocks: bool,
    ) -> None:
        self._described, self._link, self._stats, self._options = described, link, stats, options
        self._has_states = any(group.state for group in described.engine.groups)
        self._zeroes_blocks, self._steps = zeroes_blocks, steps
        self._num_left = num_left
        """Last tokens of a prompt that a load leaves to compute."""
        self._readers: dict[bytes, str] = {}
        self._reading: set[str] = set()
        """Readers that other requests wait for."""
        self._expected: dict[str, Load] = {}
        self._fetching: dict[Fetch, Load] = {}
        """Loads that may still write into their blocks."""
        self._refused: dict[str, str] = {}
        """Reasons to end requests, under any `kv_load_failure_policy`."""
        self._mismatches: dict[str, str] = {}
        self._partial: dict[str, Load] = {}
        self._failed: list[str] = []
        self._over: list[str] = []
        self._loaded: list[str] = []

    def expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        """Refuse a request without its ticket's images: vLLM would compute placeholders."""
        self._expect(request, params)
        load = self._expected.get(request.request_id)
        if load is not None and load.lacks_images:
            del self._expected[load.request_id]
            self._refuse(load)

    def refusal(self, request_id: str, *, takes_images: bool) -> str:
        """In a rendezvous, a digest mismatch may be a missing image."""
        mismatch = self._mismatches.get(request_id, "") if takes_images else ""
        return self._refused.get(request_id, mismatch)

    def expect_turn(self, request: "Request", params: Mapping[str, Any]) -> None:
        """Note a prefill request with KV in a decode engine.

        With windows, a load leaves a token to compute. To compute the last one again, vLLM would
        need a token that the window has dropped.
        """
        if not self._options.bidirectional_kv_xfer:
            logger.info(
                "kvbus: request %s: the KV of its conversation is not loaded, as "
                "bidirectional_kv_xfer is off in the options of this vLLM",
                request.request_id,
            )
            return
        self._expect(request, params)
        load = self._expected.get(request.request_id)
        if load is not None:
            leaves_none = load.num_tokens >= request.num_prompt_tokens - self._num_left
            if self._num_left and leaves_none and load.handoff is not None:
                load.num_tokens = 0
            load.min_tokens = self._options.kv_recompute_threshold

    def matched(self, request_id: str, num_computed_tokens: int) -> int | None:
        """Return None while another request loads with the same ticket, and 0 afterwards."""
        load = self._expected.get(request_id)
        if load is None:
            return 0
        if load.handoff is not None:
            if load.ticket_key not in self._readers:
                self._read_by(load)
            if (reader := self._readers[load.ticket_key]) != request_id:
                if reader in self._reading:
                    return None
                del self._expected[request_id]
                return 0
        load.first_token = num_computed_tokens
        num_tokens = load.num_tokens - num_computed_tokens
        return num_tokens if num_tokens >= max(1, load.min_tokens) else 0

    def start(self, request_id: str, block_ids: BlockIds, num_tokens: int) -> None:
        load = self._expected.pop(request_id, None)
        if load is None:
            return
        if num_tokens == 0:
            self._release(load)
            return
        stop = load.first_token + num_tokens
        try:
            tables = tables_of(self._described, block_ids, load.first_token, stop)
            fetch = self._fetch(load, stop, tables)
        except KVBusError as error:
            self._fail(load, REFUSED_AT, error.code, error.message)
            self._failed.append(request_id)
            self._count_refused()
            self._release(load)
            self._over.append(request_id)
            return
        self._fetching[fetch] = load
        if tables.partial:
            load.partial, load.gapped = tables.partial, tables.gapped
            self._partial[request_id] = load

    def partial_blocks(self, request_id: str | None = None) -> set[int]:
        if request_id is not None:
            load = self._partial.get(request_id)
            return load.partial if load is not None else set()
        return set().union(*(load.partial for load in self._partial.values()))

    def lose_blocks(self, request_id: str) -> None:
        self._partial.pop(request_id, None)

    def give_up(self, request_id: str) -> None:
        self.lose_blocks(request_id)
        self._refused.pop(request_id, None)
        self._mismatches.pop(request_id, None)
        expected = self._expected.pop(request_id, None)
        if expected is not None and expected.handoff is not None:
            self._pass_on(expected)
        self._reading.discard(request_id)
        for fetch, load in self._fetching.items():
            if load.request_id == request_id and not load.has_ended:
                load.is_given_up = True
                fetch.cancel(release_offer=True)

    def end(self, fetch: Fetch) -> None:
        load = self._fetching.get(fetch)
        if load is None:
            return
        if not load.has_ended:
            load.has_ended = True
            self._note_end(load, fetch)
        if fetch.are_blocks_free:
            del self._fetching[fetch]
            (self._over if load.has_failed else self._loaded).append(load.request_id)

    def note_computed(self, request_ids: Container[str]) -> None:
        """From now on vLLM can reuse what these requests loaded."""
        if self._reading:
            self._reading = {each for each in self._reading if each not in request_ids}

    @property
    def need_steps(self) -> bool:
        return bool(self._fetching or self._loaded)

    def take_loaded(self) -> list[str]:
        loaded, self._loaded = self._loaded, []
        return loaded

    def take_failed(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Report a failure before its end: afterwards vLLM counts the blocks as loaded."""
        failed, over = tuple(self._failed), tuple(self._over)
        self._failed, self._over = [], []
        for request_id in failed:  # vLLM frees its blocks
            self.lose_blocks(request_id)
        return failed, over

    def _expect(self, request: "Request", params: Mapping[str, Any]) -> None:
        load = self._load_of(request, params)
        # only the first of several prompts has a ticket; the others must not fail without one
        if load.handoff is not None or not is_of_later_prompt(load.request_id):
            self._expected[load.request_id] = load
        if load.handoff is not None and load.ticket_key not in self._readers:
            self._link.hold(load.handoff.ticket)

    def _load_of(self, request: "Request", params: Mapping[str, Any]) -> Load:
        num_wanted = max(0, request.num_prompt_tokens - self._num_left)
        try:
            handoff = self._handoff_of(request, params)
        except ProtocolError as error:
            lacks_images = isinstance(error, OtherImagesError)
            return Load(request.request_id, num_wanted, None, error.message, lacks_images)
        num_tokens = min(num_wanted, handoff.remote_num_tokens)
        if self._has_states and num_tokens < handoff.remote_num_tokens:
            num_tokens = 0  # a state is that after all tokens of the ticket
        return Load(
            request.request_id,
            num_tokens,
            handoff,
            priority=max(MIN_PRIORITY, min(MAX_PRIORITY, -request.priority)),
            traceparent=read_trace(params, request.trace_headers),
            min_tokens=0 if RENDEZVOUS in params else self._options.min_load_tokens,
        )

    def _handoff_of(self, request: "Request", params: Mapping[str, Any]) -> HandoffParams:
        """A request that vLLM has refused has no prompt to check."""
        if RENDEZVOUS not in params:
            handoff = read_params(params)
            if not request.abort_immediately:
                _check_prompt(request, handoff)
            return handoff
        rendezvous = Rendezvous.from_json(params[RENDEZVOUS])
        _check_tokens(request)
        num_tokens = max(0, request.num_prompt_tokens - self._num_left)
        return HandoffParams(rendezvous.to_json(), num_tokens, digest_of(request, num_tokens))

    def _read_by(self, load: Load) -> None:
        self._readers[load.ticket_key] = load.request_id
        self._reading.add(load.request_id)
        if len(self._readers) > MOST_TICKETS:
            del self._readers[next(iter(self._readers))]

    def _pass_on(self, load: Load) -> None:
        """Give the ticket to another request, or release it."""
        if self._readers.get(load.ticket_key, load.request_id) != load.request_id:
            return
        others = (one for one in self._expected.values() if one.ticket_key == load.ticket_key)
        other = next(others, None)
        self._read_by(other or load)
        if other is None:
            self._release(load)

    def _fetch(self, load: Load, stop: int, tables: Tables) -> Fetch:
        if load.handoff is None:
            raise LocalError(load.problem, code=ErrorCode.INVALID)
        _ = self._link.agent  # raises if no agent has attached yet: vLLM then computes immediately
        return self._link.fetch(
            load.handoff.ticket,
            num_tokens=stop,
            block_ids=tables.block_ids,
            first_token=load.first_token,
            zero_tail=self._zeroes_blocks,  # vLLM zeroes no block of a load
            timeout_s=self._options.fetch_timeout_s,
            fetch_id=load.fetch_id,
            prompt_digest=load.handoff.prompt_digest,
            priority=load.priority,
            traceparent=load.traceparent,
            wanted_s=load.seen_at,
            after=self._steps.after(self._steps.latest),  # it may write to blocks that vLLM freed
        )

    def _note_end(self, load: Load, fetch: Fetch) -> None:
        notice = fetch.notice
        if notice is None or load.handoff is None:
            return
        self._stats.add_load(notice, given_up=load.is_given_up)
        if notice.whole_blocks and load.handoff.whole_blocks:
            load.partial = load.gapped
        if notice.outcome is Outcome.COMPLETED:
            return
        if not load.is_given_up:
            self._fail(load, notice.stage, notice.code, notice.message)
            self._failed.append(load.request_id)
            if notice.code == ErrorCode.PROMPT_MISMATCH:
                self._mismatches[load.request_id] = notice.message
            if not fetch.are_blocks_free:
                logger.warning(
                    "kvbus: %s: its blocks stay withheld until no read can reach them", load.name()
                )
        if not load.is_given_up or notice.outcome is not Outcome.CANCELLED:
            self._release(load)  # otherwise `give_up` has done so

    def _fail(self, load: Load, stage: str, code: str, message: str) -> None:
        logger.error(
            "kvbus: %s: its KV was not loaded: %s [%s, stage %s]", load.name(), message, code, stage
        )
        load.has_failed = True

    def _refuse(self, load: Load) -> None:
        self._fail(load, REFUSED_AT, ErrorCode.INVALID, load.problem)
        self._count_refused()
        self._refused[load.request_id] = load.problem

    def _count_refused(self) -> None:
        self._stats.add(LOADS, Outcome.FAILED.value)
        self._stats.add(LOADS_FAILED, REFUSED_AT)

    def _release(self, load: Load) -> None:
        if load.handoff is not None:
            self._link.release(load.handoff.ticket)


def _check_tokens(request: "Request") -> None:
    if not has_tokens(request):
        raise ProtocolError("a prompt with embeddings is not handed off")


def _check_prompt(request: "Request", handoff: HandoffParams) -> None:
    num_tokens = handoff.remote_num_tokens
    _check_tokens(request)
    if handoff.images and images_of(request, num_tokens) != handoff.images:
        raise OtherImagesError(
            "the ticket is of a prompt with images, or other media, and this request has none of "
            "them, or others. The router must send the decode server the images that it sends the "
            "prefill server"
        )
    if num_tokens > request.num_prompt_tokens:
        raise ProtocolError(
            f"the KV is of {num_tokens} tokens, the prompt here has only "
            f"{request.num_prompt_tokens}: the router must send the ticket with the prompt, or the "
            "conversation, that it was made for"
        )
    if digest_of(request, num_tokens) != handoff.prompt_digest:
        raise ProtocolError(
            f"the ticket has another prompt, LoRA or images for the first {num_tokens} tokens: the "
            "router must send it with the prompt, or the conversation, that it was made for"
        )
    here = adapter_of(request)
    if here and handoff.adapter and here != handoff.adapter:
        raise ProtocolError(
            f"the LoRA adapter '{request.lora_request.lora_name}' has other weights, or another "
            "configuration, here than in the prefill vLLM: load the same files on both"
        )
