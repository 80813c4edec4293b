"""The connector in the scheduler's process: which requests load and offer, and how that ends."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from kvbus.errors import ProtocolError
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.growing import BlockIds, Growing
from kvbus.integrations.vllm.held_blocks import HeldBlocks
from kvbus.integrations.vllm.loads import Load, Loads
from kvbus.integrations.vllm.offers import Offers
from kvbus.integrations.vllm.options import ConnectorOptions
from kvbus.integrations.vllm.request_ids import is_of_later_prompt
from kvbus.integrations.vllm.sessions import CLOSE_WITHIN_S, ControlLink, control_link
from kvbus.integrations.vllm.stats import Figures, StatsRecorder
from kvbus.integrations.vllm.step_results import NOTHING, StepResults, WorkerPlace
from kvbus.integrations.vllm.transfer_params import (
    ASKS_TO_FETCH,
    ASKS_TO_OFFER,
    RENDEZVOUS,
    HandoffParams,
    prompt_digest,
    read_params,
    read_transfer_id,
)
from kvbus.protocol.engine import AgentRanks
from kvbus.protocol.message import MAX_PRIORITY, MIN_PRIORITY
from kvbus.protocol.rendezvous import Rendezvous

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbus")

HANDS_OFF_AFTER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """What vLLM's scheduler asks of the connector; every call returns at once."""

    def __init__(
        self,
        options: ConnectorOptions,
        engine: EngineSpec,
        select: Callable[[BlockIds], BlockIds] = tuple,
    ) -> None:
        self._options, self._engine = options, engine
        self._stats = StatsRecorder()
        self._backs_off = any(group.window is not None for group in engine.groups)
        self._link: ControlLink | None = None
        self._loads: Loads | None = None
        self._offers: Offers | None = None
        self._growing = Growing(select)
        self._held: HeldBlocks | None = None

    def hold_in(self, held: HeldBlocks) -> None:
        """Where the blocks of offers are held; without it nothing is offered."""
        self._held = held

    def meet_workers(self, workers: Iterable[WorkerPlace]) -> None:
        """The workers have shared their memory: open the engine's control session."""
        others = ranks_elsewhere(sorted(workers, key=lambda worker: worker.rank))
        link = self._link = control_link(self._options.attach_path, self._engine, others)
        options = self._options
        self._loads = Loads(self._engine, link, self._stats, timeout_s=options.fetch_timeout_s)
        self._offers = Offers(self._engine, link, self._stats, ttl_s=options.offer_ttl_s)

    def wait_up(self, timeout_s: float) -> bool:
        """Whether the control session was open within ``timeout_s``."""
        return self._link is not None and self._link.wait_open(timeout_s)

    def expect(self, request: "Request") -> None:
        """A request has come; blocks that are free by now are there for it."""
        self._free_released()
        params = request.kv_transfer_params or {}
        if params.get(ASKS_TO_FETCH) and self._loads is not None:
            load = self._load_of(request, params)
            if load.handoff is not None or not is_of_later_prompt(request.request_id):
                self._loads.expect(load)
        if params.get(ASKS_TO_OFFER) and self._backs_off:
            leave_last_token(request)

    def matched(self, request: "Request", num_computed_tokens: int) -> int | None:
        """How many tokens can be loaded behind those that vLLM has; None: ask again."""
        if self._loads is None:
            return 0
        return self._loads.matched(request.request_id, num_computed_tokens)

    def allocated(
        self, request: "Request", block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The request has blocks: load into them, or ask for the ticket of what they will hold."""
        if self._loads is not None:
            self._loads.start(request.request_id, block_ids, num_external_tokens)
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
        if self._loads is not None:
            self._loads.give_up(request.request_id)
        params = request.kv_transfer_params or {}
        if not params.get(ASKS_TO_OFFER) or self._offers is None or self._held is None:
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        self._growing.end(request.request_id)
        if request.status not in HANDS_OFF_AFTER or num_tokens == 0 or not _has_tokens(request):
            self._offers.abandon(request.request_id)
            return False, None
        ticket = self._offers.publish(request.request_id, block_ids, num_tokens)
        if ticket is None:
            return False, None
        self._held.hold(ticket["offer_id"], block_ids)
        digest = _digest(request, num_tokens)
        return False, HandoffParams(ticket, num_tokens, digest).to_params()

    def step(self, output: "SchedulerOutput") -> StepResults:
        """What the workers shall report to vLLM in this step, which will compute ``output``."""
        if self._loads is None or self._offers is None:
            return NOTHING
        for request_id in output.preempted_req_ids or ():  # its blocks are another's from now on
            self._growing.end(request_id)
            self._offers.take_back(request_id)
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
        """End the control session, and with it every load and offer."""
        if self._link is not None:
            self._link.close(CLOSE_WITHIN_S)

    def _free_released(self) -> None:
        if self._offers is not None and self._held is not None:
            self._held.free(offer.offer_id for offer in self._offers.take_released())

    def _reserve(self, request: "Request", params: Mapping[str, Any], offers: Offers) -> None:
        """With a name of the router's it may be read while it is computed, if no block goes back.

        The blocks that a window leaves behind do.
        """
        request_id = request.request_id
        try:
            transfer_id = read_transfer_id(params)
        except ProtocolError as error:
            logger.error("kvbus: request %s: %s", request_id, error.message)
            transfer_id = None
        offers.reserve(request_id, partial(_digest_of_prompt, request), transfer_id)
        if transfer_id is not None and not self._backs_off:
            self._growing.begin(request_id)

    def _load_of(self, request: "Request", params: Mapping[str, Any]) -> Load:
        num_wanted = request.num_prompt_tokens - self._backs_off
        try:
            handoff = self._handoff_of(request, params)
            _check_prompt(request, handoff)
        except ProtocolError as error:
            return Load(request.request_id, num_wanted, None, error.message)
        num_tokens, priority = min(num_wanted, handoff.remote_num_tokens), urgency_of(request)
        return Load(request.request_id, num_tokens, handoff, priority=priority)

    def _handoff_of(self, request: "Request", params: Mapping[str, Any]) -> HandoffParams:
        """What the router carries; by a rendezvous, all of the prompt is going to be there."""
        if RENDEZVOUS not in params:
            return read_params(params)
        meets = Rendezvous.from_json(params[RENDEZVOUS])
        num_tokens = request.num_prompt_tokens - self._backs_off
        return HandoffParams(meets.to_json(), num_tokens, _digest(request, num_tokens))


def urgency_of(request: "Request") -> int:
    """The priority of its load: vLLM's own counts the other way, and may be any number."""
    vllms: int = request.priority
    return max(MIN_PRIORITY, min(MAX_PRIORITY, -vllms))


def leave_last_token(request: "Request") -> None:
    """Have the prefill engine compute all but the last token of the prompt.

    The decode engine computes that one in any case, for its logits. With a sliding window it needs
    a token for it that vLLM drops once the last one was computed, if it is the last of its block.
    """
    if request.num_prompt_tokens > 1 and request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1]
        del request._all_token_ids[-1]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1


def ranks_elsewhere(workers: Sequence[WorkerPlace]) -> list[AgentRanks]:
    """The ranks whose agent is not that of the first; one access to an agent does for all."""
    elsewhere: dict[str, list[WorkerPlace]] = {}
    for worker in workers:
        if worker.peer_endpoint not in ("", workers[0].peer_endpoint):
            elsewhere.setdefault(worker.peer_endpoint, []).append(worker)
    return [
        AgentRanks(endpoint, tuple(one.rank for one in there), there[0].access, there[0].server_key)
        for endpoint, there in elsewhere.items()
    ]


def _has_tokens(request: "Request") -> bool:
    """Whether the prompt is all tokens: embeddings in it are not named by anything."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def _check_prompt(request: "Request", handoff: HandoffParams) -> None:
    num_tokens = handoff.remote_num_tokens
    if not _has_tokens(request):
        raise ProtocolError("a prompt with embeddings is not handed off")
    if num_tokens > request.num_prompt_tokens:
        raise ProtocolError(
            f"the prefill engine computed {num_tokens} tokens, the prompt here has only "
            f"{request.num_prompt_tokens}: the router must send both the same request"
        )
    if _digest(request, num_tokens) != handoff.prompt_digest:
        raise ProtocolError(
            f"the first {num_tokens} tokens of the prompt, its LoRA or its images are not those of "
            "the prefill engine: the router must send both the same request"
        )


def _digest_of_prompt(request: "Request") -> str:
    """That of all that the prefill engine computes, for the ticket; empty when there is none."""
    return _digest(request, request.num_prompt_tokens) if _has_tokens(request) else ""


def _digest(request: "Request", num_tokens: int) -> str:
    lora = request.lora_request
    conditions = [lora.lora_name if lora is not None else ""]
    conditions += [feature.identifier for feature in request.mm_features]
    return prompt_digest(request.all_token_ids[:num_tokens], conditions)
