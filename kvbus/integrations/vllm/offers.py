"""Offers of a prefill engine, in the scheduler's thread.

The ticket is requested when a request is first scheduled, so that it arrives before the last token.
A named offer grows with each step, as its reader needs no ticket.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from kvbus.engine import Link, Offer, OfferOptions
from kvbus.errors import ErrorCode, GeometryError, KVBusError, LocalError, PeerLost
from kvbus.geometry import GroupSpec, num_blocks_for
from kvbus.integrations.vllm.params import (
    Description,
    agents_id,
    digest_of,
    prompt_of_sequence,
)
from kvbus.integrations.vllm.stats import OFFERED_TOKENS, OFFERS, OFFERS_FAILED, KvbusStats
from kvbus.integrations.vllm.steps import Steps
from kvbus.protocol.engine import Outcome, Park

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbus")

NULL_BLOCK = 0
"""vLLM's placeholder for blocks that a window has left behind."""
TICKET_WITHIN_S = 1.0
"""Limit of a wait for a ticket, unless the agent is known to hang."""
AGENT_WITHIN_S = 10.0
"""Limit of all waits for a lost agent's successor. A restart takes 2 or 3 s."""
STEPS_ON_S = 1.0
"""Time that vLLM steps on after an offer: nothing wakes vLLM to free its blocks later."""

LIVES_KEPT = 8

BlockIds = Sequence[Sequence[int]]
"""By group, from the request's first block."""


class Tables(NamedTuple):
    """Blocks by group, and the first one's number.

    Windows begin inside ``partial`` blocks, which are vLLM's. A handoff does not fill the beginning
    of ``gapped`` ones even if all blocks that it lists are whole.
    """

    block_ids: dict[str, list[int]]
    first_blocks: dict[str, int]
    partial: set[int]
    gapped: set[int]


def tables_of(
    described: Description, block_ids: BlockIds, first_token: int, stop_token: int
) -> Tables:
    """Return the blocks of [first_token, stop_token); raise `GeometryError` if one is missing."""
    tables = Tables({}, {}, set(), set())
    for group, source in zip(described.engine.groups, described.sources, strict=True):
        start, stop = group.positions(first_token, stop_token)
        if start >= stop:
            continue
        ids = block_ids[source.transfer_group]
        if group.state:
            tables.block_ids[group.name], tables.first_blocks[group.name] = [_last(group, ids)], 0
            continue
        num_kernel, size = source.num_kernel_blocks, group.block_size
        first, end = start // size, num_blocks_for(stop, size)
        first_whole = first // num_kernel
        whole = _needed(group, ids, first_whole, num_blocks_for(end, num_kernel))
        split = whole
        if num_kernel > 1:
            split = [one * num_kernel + at for one in whole for at in range(num_kernel)]
        skipped = first - first_whole * num_kernel
        tables.block_ids[group.name] = split[skipped : skipped + end - first]
        tables.first_blocks[group.name] = first
        begins = max(first_token, first_whole * num_kernel * size)
        if start > begins:  # a window begins in it
            tables.partial.add(whole[0])
        if first * size > begins:
            tables.gapped.add(whole[0])
    return tables


def _needed(group: GroupSpec, ids: Sequence[int], first: int, end: int) -> list[int]:
    needed = list(ids[first:end])
    if len(needed) < end - first or NULL_BLOCK in needed:
        raise _missing(group, ids, f"blocks {first} to {end}")
    return needed


def _last(group: GroupSpec, ids: Sequence[int]) -> int:
    """Return the block of the running state; vLLM may keep earlier states in front of it."""
    if not ids or ids[-1] == NULL_BLOCK:
        raise _missing(group, ids, "the running state")
    return ids[-1]


def _missing(group: GroupSpec, ids: Sequence[int], needed: str) -> GeometryError:
    return GeometryError(
        f"group '{group.name}': vLLM keeps {len(ids)} blocks of the request, and not all of "
        f"{needed}",
        group=group.name,
    )


@dataclass(slots=True, eq=False)
class RequestOffer:
    """``planned`` pairs steps with the prompt tokens computed by their end.

    ``computed_in`` is the last of these steps; ``num_sent`` counts the offer's blocks by group.
    """

    request: "Request"
    options: OfferOptions
    is_answer: bool = False
    planned: deque[tuple[int, int]] = field(default_factory=deque)
    computed_in: int = 0
    offer: Offer = field(init=False)
    num_sent: dict[str, int] = field(init=False)
    held: "list[KVCacheBlock]" = field(default_factory=list)
    published_s: float = 0.0
    is_unwanted: bool = False

    @property
    def request_id(self) -> str:
        return str(self.request.request_id)

    def request_offer(self, link: Link) -> None:
        self.num_sent = {}
        name = agents_id(self.request_id)
        self.offer = link.offer(name, num_tokens=0, block_ids={}, **self.options)

    # Tokens are ready when vLLM reports that their step is done, and its number is reached. The
    # same holds for tokens of the prefix cache: vLLM counts among them tokens that other requests
    # compute in the same step.
    def plan(self, step: int, num_scheduled: int) -> None:
        num_tokens, end = self.request.num_computed_tokens, self.request.num_prompt_tokens
        if num_tokens < end:
            self.planned.append((step, min(num_tokens + num_scheduled, end)))
            self.computed_in = step

    def ready(self, step: int) -> int:
        num_tokens = 0
        while self.planned and self.planned[0][0] <= step:
            _, num_tokens = self.planned.popleft()
        return num_tokens

    def extend(self, num_tokens: int, tables: Tables, after: int) -> None:
        sent = self.num_sent
        more = {group: ids[sent.get(group, 0) :] for group, ids in tables.block_ids.items()}
        first_blocks = {} if self.num_sent else tables.first_blocks
        self.num_sent = {group: len(ids) for group, ids in tables.block_ids.items()}
        unsent = {group: ids for group, ids in more.items() if ids}
        self.offer.extend(num_tokens, unsent, first_blocks=first_blocks, after=after)

    def withdraw(self) -> None:
        self.is_unwanted = True
        self.offer.withdraw()


# The connector has its own reference to the blocks of an offer. So vLLM ends a request once it is
# computed, and an engine with unread offers rests. If vLLM itself kept the request for its blocks,
# it would step without a pause. A block that is freed while vLLM uses it, or that is not held,
# gives another request's KV to a reader.
#
#     request ends ──▶ held: 2 references ──▶ vLLM frees: 1 ──▶ offer released ──▶ freed: 0
class RequestOffers:
    """With ``drains``, vLLM's shutdown waits for readers of prompts, not of answers."""

    def __init__(
        self,
        described: Description,
        link: Link,
        pool: "BlockPool",
        stats: KvbusStats,
        steps: Steps,
        *,
        drains: bool,
        park: Park,
    ) -> None:
        self._steps, self._park = steps, park
        self._described, self._link, self._pool, self._stats = described, link, pool, stats
        self._drains, self._last_s = drains, 0.0
        self._lives_s: deque[float] = deque(maxlen=LIVES_KEPT)
        self._waits_since_s, self._waited_in = 0.0, -2
        self._reserved: dict[str, RequestOffer] = {}
        self._growing: dict[str, RequestOffer] = {}
        self._published: dict[Offer, RequestOffer] = {}
        self._late: Offer | None = None
        self._agent_by_s = 0.0
        link.when_changed(self._note_agent)

    def reserve(
        self,
        request: "Request",
        num_tokens: int,
        *,
        grows: bool = False,
        is_answer: bool = False,
        **options: Unpack[OfferOptions],
    ) -> None:
        """Idempotent."""
        request_id = request.request_id
        if request_id in self._reserved:
            return
        options |= {"sealed": False, "prompt_digest": digest_of(request, num_tokens)}
        options["park"] = self._park
        reserved = self._reserved[request_id] = RequestOffer(request, options, is_answer)
        reserved.request_offer(self._link)
        if grows:
            self._growing[request_id] = reserved
        if reserved.offer.request_id != request_id:
            logger.info(
                "kvbus: request %s: agents call it %s, as its id is long",
                request_id,
                reserved.offer.request_id,
            )

    def schedule(self, step: int, num_scheduled_tokens: Mapping[str, int]) -> bool:
        """Return whether a worker must report the end of ``step``."""
        for request_id, reserved in self._reserved.items():
            if request_id in num_scheduled_tokens:
                reserved.plan(step, num_scheduled_tokens[request_id])
        return bool(self._growing)

    def grow(self, step: int, blocks_of: Callable[[str], BlockIds]) -> None:
        for request_id, reserved in self._growing.items():
            num_tokens = reserved.ready(step)
            if not num_tokens or reserved.is_unwanted:
                continue
            try:
                tables = tables_of(self._described, blocks_of(request_id), 0, num_tokens)
                reserved.extend(num_tokens, tables, self._steps.after(step))
            except KVBusError as error:  # if it lasts, `publish` reports it
                logger.info(
                    "kvbus: request %s: its first %s tokens cannot be read yet: %s",
                    request_id,
                    num_tokens,
                    error.message,
                )

    # The offer names blocks that another request writes to from now on, and they stay in its
    # tables. So it cannot be sealed with the tokens that are computed again. Its reader knows the
    # name and computes them as well. Other offers have no blocks yet.
    def take_back(self, request_id: str) -> None:
        reserved = self._growing.pop(request_id, None)
        if reserved is not None:
            reserved.withdraw()

    def withdraw(self, request_id: str) -> None:
        self._growing.pop(request_id, None)
        reserved = self._reserved.pop(request_id, None)
        if reserved is not None:
            reserved.withdraw()

    def publish(
        self, request_id: str, block_ids: BlockIds, num_tokens: int
    ) -> dict[str, Any] | None:
        """Wait for the ticket of ``block_ids``, and hold them for readers.

        Returns None, and logs why, if no agent offers the blocks.
        """
        reserved = self._reserved.get(request_id)
        if reserved is None:
            return None
        try:
            tables = tables_of(self._described, block_ids, 0, num_tokens)
            offer = self._made(reserved)
        except KVBusError as error:
            if not reserved.is_unwanted:
                self._log_not_offered(request_id, error)
            self.withdraw(request_id)
            return None
        del self._reserved[request_id]
        self._growing.pop(request_id, None)
        # an answer grows up to its last step
        after = self._steps.after(reserved.computed_in or self._steps.latest)
        reserved.extend(num_tokens, tables, after)
        offer.seal(after=after)
        self._withdraw_other_sequences(request_id)
        self._published[offer] = reserved
        self._hold(reserved, block_ids)
        self._stats.add(OFFERED_TOKENS, num_tokens)
        # vLLM does not write these tokens again, so the ticket can name their blocks. A preempted
        # request has no blocks, or was computed again. Steps that are scheduled ahead write behind
        # these tokens.
        return offer.ticket_naming(num_tokens, tables.block_ids, first_blocks=tables.first_blocks)

    def bound_answers(self, max_blocks: int) -> None:
        answers = [one for one in self._published.values() if one.is_answer and not one.is_unwanted]
        num_blocks = sum(len(one.held) for one in answers)
        for one in answers:
            if num_blocks > max_blocks:
                one.withdraw()
                num_blocks -= len(one.held)

    def end(self, offer: Offer) -> None:
        published = self._published.pop(offer, None)
        if published is None:
            for reserved in self._reserved.values():
                if reserved.offer is offer:
                    self._request_again(reserved)
            return
        # In vLLM's order: the end of a prompt leaves the prefix cache first.
        self._pool.free_blocks(reversed(published.held))
        frees = offer.outcome in (Outcome.COMPLETED, Outcome.PARKED)
        if frees and not published.is_answer:
            self._lives_s.append(time.monotonic() - published.published_s)
        self._stats.add(OFFERS, (offer.outcome or Outcome.FAILED).value)
        if offer.error is not None and not isinstance(offer.error, PeerLost):
            self._log_not_offered(published.request_id, offer.error)

    @property
    def may_park(self) -> bool:
        """Whether the agent may park an offer sooner because vLLM lacks blocks."""
        return self._park is Park.WHEN_FULL and bool(self._published)

    @property
    def need_steps(self) -> bool:
        """Whether vLLM must keep stepping without work: readers of prompts come soon."""
        if all(one.is_answer for one in self._published.values()):
            return False
        return self._drains or time.monotonic() - self._last_s < STEPS_ON_S

    # Most readers hold no lease, so the agent does not know when a read begins. An offer counts as
    # being read for as long as the last ones took. If that is long, decode engines are busy, and
    # preempting is better. The wait of a running request is bounded, too: vLLM may give the freed
    # blocks to new requests.
    def frees_soon(self, step: int) -> bool:
        """Return whether a reader is about to free its blocks.

        Call this in each ``step`` in which vLLM lacks a block.
        """
        now, within_s = time.monotonic(), max(self._lives_s, default=0.0)
        if step > self._waited_in + 1:
            self._waits_since_s = now
        self._waited_in = step
        published = [one.published_s for one in self._published.values() if not one.is_answer]
        if not published or within_s > STEPS_ON_S:
            return False
        return now - max(published) < within_s > now - self._waits_since_s

    def _hold(self, published: RequestOffer, block_ids: BlockIds) -> None:
        blocks = [self._pool.blocks[one] for ids in block_ids for one in ids if one != NULL_BLOCK]
        self._pool.touch(blocks)
        published.held, published.published_s = blocks, time.monotonic()
        if not published.is_answer:
            self._last_s = published.published_s

    def _made(self, reserved: RequestOffer) -> Offer:
        """If the agent hangs, wait only once. If it is lost, wait for its successor."""
        if reserved.offer.ended.done():
            self._request_again(reserved)
        offer = reserved.offer
        try:
            offer.made.wait(self._wait_s())
        except TimeoutError as error:
            self._late = offer
            why = self._link.problem or "the agent has not answered in time"
            raise LocalError(f"there is no ticket: {why}", code=ErrorCode.TIMEOUT) from error
        if offer.ended.done():
            raise offer.error or LocalError("its ticket expired in that moment")
        return offer

    def _wait_s(self) -> float:
        if not self._link.is_open:
            return max(0.0, self._agent_by_s - time.monotonic())
        answers = self._late is None or self._late.made.done()
        return TICKET_WITHIN_S if answers else 0.0

    def _note_agent(self) -> None:
        """Runs in the link's thread."""
        if not self._link.is_open:
            self._agent_by_s = time.monotonic() + AGENT_WITHIN_S

    def _request_again(self, reserved: RequestOffer) -> None:
        """Replace an offer that expired, or was lost with its agent.

        If the agent had made it, the new one has no name, and cannot grow.
        """
        offer = reserved.offer
        error, was_made = offer.error, bool(offer.offer_id)
        if reserved.options.get("transfer_id") is not None:
            is_cancelled = error is not None and error.code == ErrorCode.CANCELLED
            withdrawn = error is None and offer.outcome is Outcome.WITHDRAWN
            reserved.is_unwanted |= is_cancelled or withdrawn
        if reserved.is_unwanted or not (error is None or isinstance(error, PeerLost)):
            return
        if was_made:
            reserved.options["transfer_id"] = None
            self._growing.pop(reserved.request_id, None)
        if was_made or self._link.is_open:
            reserved.request_offer(self._link)

    def _withdraw_other_sequences(self, request_id: str) -> None:
        """Keep the last one to end: vLLM's response has its ticket."""
        prompt = prompt_of_sequence(request_id)
        for one in self._published.values() if prompt is not None else ():
            if prompt_of_sequence(one.request_id) == prompt and not one.is_unwanted:
                one.withdraw()

    def _log_not_offered(self, request_id: str, error: KVBusError) -> None:
        self._stats.add(OFFERS_FAILED, 1)
        logger.error(
            "kvbus: request %s: its KV is not offered, who decodes it has to compute it again: "
            "%s [%s]",
            request_id,
            error.message,
            error.code,
        )
