"""The connector in the scheduler's process: which requests load and offer, and how that ends."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.request import RequestStatus

from kvbus.errors import ProtocolError
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.answers import Answers
from kvbus.integrations.vllm.growing import BlockIds, Growing
from kvbus.integrations.vllm.held_blocks import HeldBlocks
from kvbus.integrations.vllm.loads import Load, Loads
from kvbus.integrations.vllm.offers import Offers
from kvbus.integrations.vllm.options import ConnectorOptions
from kvbus.integrations.vllm.prompts import (
    check_prompt,
    check_tokens,
    digest_of,
    digest_of_prompt,
    has_tokens,
    leave_last_token,
)
from kvbus.integrations.vllm.request_ids import is_later_sequence, is_of_later_prompt
from kvbus.integrations.vllm.sessions import (
    CLOSE_WITHIN_S,
    ControlLink,
    control_link,
    ranks_elsewhere,
)
from kvbus.integrations.vllm.stats import Figures, StatsRecorder
from kvbus.integrations.vllm.step_results import NOTHING, StepResults, WorkerPlace
from kvbus.integrations.vllm.transfer_params import (
    ASKS_TO_FETCH,
    ASKS_TO_OFFER,
    RENDEZVOUS,
    TICKET,
    TRANSFER_ID,
    HandoffParams,
    read_params,
    read_readers,
    read_trace,
    read_transfer_id,
)
from kvbus.protocol.message import MAX_PRIORITY, MIN_PRIORITY
from kvbus.protocol.ticket import Rendezvous

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbus")

HANDS_OFF_AFTER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """What vLLM's scheduler asks of the connector.

    Only the end of a request that is offered waits: for its ticket, a second at most.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        engine: EngineSpec,
        select: Callable[[BlockIds], BlockIds] = tuple,
        *,
        num_blocks: int = 0,
        kv_role: str = "kv_both",
    ) -> None:
        self._options, self._engine, self._kv_role = options, engine, kv_role
        self._stats = StatsRecorder()
        self._backs_off = any(group.window is not None for group in engine.groups)
        self._num_blocks = num_blocks
        self._links: list[ControlLink] = []
        self._loads: Loads | None = None
        self._offers: Offers | None = None
        self._answers: Answers | None = None
        self._growing = Growing(select)
        self._held: HeldBlocks | None = None

    def hold_in(self, held: HeldBlocks) -> None:
        """Where the blocks of offers are held; without it nothing is offered."""
        self._held = held

    def meet_workers(self, workers: Iterable[Sequence[WorkerPlace]]) -> None:
        """The workers have shared their memory, with each agent: open the control sessions."""
        options, told = self._options, list(workers)
        for number, (path, role) in enumerate(options.agents):
            places = sorted((each[number] for each in told), key=lambda place: place.rank)
            others = ranks_elsewhere(places)
            self._links.append(control_link(path, self._engine, others, role, self._kv_role))
        offering, loading = self._links[0], self._links[-1]
        self._loads = Loads(self._engine, loading, self._stats, timeout_s=options.fetch_timeout_s)
        self._offers = Offers(self._engine, offering, self._stats, ttl_s=options.offer_ttl_s)
        if options.bidirectional_kv_xfer:
            max_blocks = int(options.decoder_kv_blocks_share * self._num_blocks)
            self._answers = Answers(
                self._offers, max_blocks=max_blocks, ttl_s=options.decoder_kv_blocks_ttl
            )

    def wait_up(self, timeout_s: float) -> bool:
        """Whether each control session was open within ``timeout_s`` of the one before."""
        return bool(self._links) and all(link.wait_open(timeout_s) for link in self._links)

    def expect(self, request: "Request") -> None:
        """A request has come; blocks that are free by now are there for it."""
        self._free_released()
        params = request.kv_transfer_params or {}
        asks_to_offer = bool(params.get(ASKS_TO_OFFER))
        if self._loads is not None:
            if asks_to_offer and params.get(TICKET):
                self._expect_turn(request, params, self._loads)
            elif params.get(ASKS_TO_FETCH):
                self._expect(request, self._load_of(request, params), self._loads)
        if asks_to_offer and self._backs_off:
            leave_last_token(request)

    def matched(self, request: "Request", num_computed_tokens: int) -> int | None:
        """How many tokens can be loaded behind those that vLLM has; None: ask again."""
        if self._loads is None:
            return 0
        if self._uncache_partial():  # vLLM may just have found one of them for this request
            return None
        return self._loads.matched(request.request_id, num_computed_tokens)

    def allocated(
        self, request: "Request", block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The request has blocks: load into them, or ask for the ticket of what they will hold."""
        if self._loads is not None:
            self._loads.start(request.request_id, block_ids, num_external_tokens)
            self._uncache_partial()
        params = request.kv_transfer_params or {}
        if self._offers is None or is_of_later_prompt(request.request_id):
            return
        if params.get(ASKS_TO_OFFER):
            self._reserve(request, params, self._offers)

    def finished(
        self, request: "Request", block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether vLLM shall keep its blocks, and what the router shall carry.

        The blocks of an offer are held here, so vLLM need not keep those of any request.
        """
        has_gap = False
        if self._loads is not None:
            partial_blocks = self._loads.partial_blocks(request.request_id)
            has_gap = any(partial_blocks.intersection(ids) for ids in block_ids)
            self._loads.give_up(request.request_id)
        params = request.kv_transfer_params or {}
        if self._offers is None or self._held is None or not params:
            return False, None
        hands_off = request.status in HANDS_OFF_AFTER and has_tokens(request)
        if not params.get(ASKS_TO_OFFER):
            is_first = not is_of_later_prompt(request.request_id)
            if not (hands_off and is_first):
                return False, None
            return False, self._offer_answer(request, block_ids, whole_blocks=not has_gap)
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._growing.end(request.request_id)
        if not hands_off or num_tokens == 0 or (has_gap and params.get(TRANSFER_ID)):
            self._offers.abandon(request.request_id)  # a reader that knows its name hears of no gap
            return False, None
        ticket = self._offers.publish(request.request_id, block_ids, num_tokens)
        if ticket is None:
            return False, None
        self._held.hold(ticket["offer_id"], block_ids)
        is_whole = num_tokens == request.num_prompt_tokens
        digest = ticket["prompt_digest"] if is_whole else digest_of(request, num_tokens)
        return False, HandoffParams(ticket, num_tokens, digest, not has_gap).to_params()

    def step(self, output: "SchedulerOutput") -> StepResults:
        """What the workers shall report to vLLM in this step, which will compute ``output``."""
        if self._loads is None or self._offers is None:
            return NOTHING
        self._uncache_partial()
        for request_id in output.preempted_req_ids or ():  # its blocks are another's from now on
            self._growing.end(request_id)
            self._offers.take_back(request_id)
            self._loads.lose_blocks(request_id)
        self._free_released()
        self._loads.note_computed(output.num_scheduled_tokens)
        step = self._growing.schedule(output)
        started = self._loads.take_started()
        failed, received = self._loads.take_ended()
        if not (started or failed or received or step):
            return NOTHING
        return StepResults(started, received, failed, step)

    @property
    def needs_steps(self) -> bool:
        """Whether vLLM is to go on with steps, though it has nothing to compute."""
        return self._held is not None and self._held.needs_steps

    def done(self, step: int) -> None:
        """The workers have computed a step."""
        if self._offers is not None:
            for ready in self._growing.done(step):
                self._offers.grow(ready)

    def take_figures(self) -> Figures | None:
        """What happened since the last call, for vLLM's statistics."""
        return self._stats.take()

    def close(self) -> None:
        """End the control sessions, and with them every load and offer."""
        for link in self._links:
            link.close(CLOSE_WITHIN_S)

    # vLLM takes every block that a load has filled for whole. One whose beginning was not loaded
    # must be found by no other request, though its own goes on with it: vLLM would read what was
    # there before. It enters the prefix cache within a pass of vLLM's scheduler, and leaves it in
    # the same:
    #
    #     running requests: given blocks     it enters, when its request has filled the rest of it
    #     waiting: the load has ended        it enters
    #              looked up in the cache
    #              `matched`                 it leaves, and "ask again", as it may have been found
    #              `allocated`               it leaves, so that as a rule it was not found
    #     `step`                             it leaves
    #
    # A whole block with the same hash stays.
    def _uncache_partial(self) -> bool:
        if self._loads is None or self._held is None:
            return False
        return self._held.uncache(self._loads.partial_blocks())

    def _free_released(self) -> None:
        if self._offers is not None and self._held is not None:
            released = [offer.offer_id for offer in self._offers.take_released()]
            self._held.free(released)
            if self._answers is not None:
                self._answers.forget(released)

    def _reserve(self, request: "Request", params: Mapping[str, Any], offers: Offers) -> None:
        """With a name of the router's it may be read while it is computed, if no block goes back.

        The blocks that a window leaves behind do. Of several sequences of a prompt the first has
        the name, and who knows that needs no ticket of the others.
        """
        request_id = request.request_id
        transfer_id, readers = None, 1
        try:
            transfer_id = read_transfer_id(params)
            readers = read_readers(params)
        except ProtocolError as error:
            logger.error("kvbus: request %s: %s", request_id, error.message)
        if transfer_id is not None and is_later_sequence(request_id):
            return
        offers.reserve(
            request_id,
            partial(digest_of_prompt, request),
            transfer_id,
            readers=readers,
            traceparent=read_trace(params, request.trace_headers),
        )
        if transfer_id is not None and not self._backs_off:
            self._growing.begin(request_id, request.num_prompt_tokens)

    def _offer_answer(
        self, request: "Request", block_ids: Sequence[Sequence[int]], *, whole_blocks: bool
    ) -> dict[str, Any] | None:
        """Offer prompt and answer, if the answer of the server can carry a ticket.

        That of a stream has no place for one. The last token is not computed, though a step that
        was scheduled ahead may be about to.
        """
        sampling = request.sampling_params
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        is_streamed = sampling is None or sampling.output_kind is RequestOutputKind.DELTA
        if self._answers is None or self._held is None or is_streamed or num_tokens == 0:
            return None
        digest = digest_of(request, num_tokens)
        ticket = self._answers.publish(request.request_id, digest, block_ids, num_tokens)
        if ticket is None:
            return None
        self._held.hold(ticket["offer_id"], block_ids, is_awaited=False)
        return HandoffParams(ticket, num_tokens, digest, whole_blocks).to_params(next_turn=True)

    def _expect_turn(self, request: "Request", params: Mapping[str, Any], loads: Loads) -> None:
        """A prompt to prefill that goes on a conversation whose KV a decode engine has.

        Nothing is loaded where computing is as fast, and with a window nothing that leaves no token
        to compute: vLLM would compute the last again, which needs one that is gone.
        """
        if self._answers is None:
            logger.info(
                "kvbus: request %s: the KV of its conversation is not loaded, as "
                "bidirectional_kv_xfer is off in the options of this vLLM",
                request.request_id,
            )
            return
        load = self._load_of(request, params)
        leaves_none = load.num_tokens >= request.num_prompt_tokens - 1
        if self._backs_off and leaves_none and not load.problem:
            load.num_tokens = 0
        load.min_tokens = self._options.kv_recompute_threshold
        self._expect(request, load, loads)

    def _expect(self, request: "Request", load: Load, loads: Loads) -> None:
        """A ticket is of the first prompt of several, and no problem for the others."""
        if load.handoff is not None or not is_of_later_prompt(request.request_id):
            loads.expect(load)

    def _load_of(self, request: "Request", params: Mapping[str, Any]) -> Load:
        num_wanted = request.num_prompt_tokens - self._backs_off
        try:
            handoff = self._handoff_of(request, params)
        except ProtocolError as error:
            return Load(request.request_id, num_wanted, None, error.message)
        num_tokens, priority = min(num_wanted, handoff.remote_num_tokens), urgency_of(request)
        trace = read_trace(params, request.trace_headers)
        return Load(request.request_id, num_tokens, handoff, priority=priority, traceparent=trace)

    def _handoff_of(self, request: "Request", params: Mapping[str, Any]) -> HandoffParams:
        """What the router carries; by a rendezvous, all of the prompt is going to be there.

        A request that vLLM has refused comes without its prompt.
        """
        if RENDEZVOUS not in params:
            handoff = read_params(params)
            if not request.abort_immediately:
                check_prompt(request, handoff)
            return handoff
        meets = Rendezvous.from_json(params[RENDEZVOUS])
        check_tokens(request)
        num_tokens = request.num_prompt_tokens - self._backs_off
        return HandoffParams(meets.to_json(), num_tokens, digest_of(request, num_tokens))


def urgency_of(request: "Request") -> int:
    """The priority of its load: vLLM's own counts the other way, and may be any number."""
    vllms: int = request.priority
    return max(MIN_PRIORITY, min(MAX_PRIORITY, -vllms))
