"""The connector in the scheduler's process: which requests load and offer, and what became of it.

Refuses to decide about blocks by itself: vLLM keeps them until a step's results say what is over.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.request import RequestStatus

from kvbus.errors import GeometryError, ProtocolError
from kvbus.geometry import EngineSpec
from kvbus.integrations.vllm.contract import (
    ASKS_TO_FETCH,
    ASKS_TO_OFFER,
    HandoffParams,
    prompt_digest,
    read_params,
)
from kvbus.integrations.vllm.link import AgentLink
from kvbus.integrations.vllm.loads import Load, Loads
from kvbus.integrations.vllm.offers import Offers
from kvbus.integrations.vllm.options import ConnectorOptions
from kvbus.integrations.vllm.sessions import ControlSession, control_session
from kvbus.integrations.vllm.step_results import StepResults, WorkerIntroduction
from kvbus.integrations.vllm.tally import Figures, Tally

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbus")

NOTHING = StepResults()
HANDS_OFF_AFTER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class SchedulerSide:
    """What vLLM's scheduler asks of the connector; every call returns at once."""

    def __init__(self, options: ConnectorOptions) -> None:
        self._options = options
        self._tally = Tally()
        self._link: AgentLink[ControlSession] | None = None
        self._loads: Loads | None = None
        self._offers: Offers | None = None

    def meet_workers(self, workers: Iterable[WorkerIntroduction]) -> None:
        """Open the control session of the engine that the workers have described."""
        workers = sorted(workers, key=lambda worker: worker.rank)
        if len({worker.engine for worker in workers}) != 1:
            raise GeometryError("the workers of this vLLM describe different engines")
        engine = msgspec.msgpack.decode(workers[0].engine, type=EngineSpec)
        others = ranks_elsewhere(workers)
        self._link = AgentLink(
            "the control session",
            lambda: control_session(self._options.attach_path, engine, others),
        )
        self._loads = Loads(
            engine, self._link, self._tally, timeout_s=self._options.fetch_timeout_s
        )
        self._offers = Offers(engine, self._link, self._tally, ttl_s=self._options.offer_ttl_s)

    def expect(self, request: "Request") -> None:
        """A request has come."""
        params = request.kv_transfer_params
        if self._loads is not None and params and params.get(ASKS_TO_FETCH):
            self._loads.expect(_load_of(request, params))

    def matched(self, request: "Request", num_computed_tokens: int) -> int:
        """How many tokens can be loaded behind those that vLLM has."""
        if self._loads is None:
            return 0
        return self._loads.matched(request.request_id, num_computed_tokens)

    def allocated(
        self, request: "Request", block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """The request has blocks: load into them, or ask for the ticket of what they will hold."""
        if self._loads is not None:
            self._loads.start(request.request_id, block_ids, num_external_tokens)
        params = request.kv_transfer_params
        if self._offers is not None and params and params.get(ASKS_TO_OFFER):
            self._offers.reserve(request.request_id)

    def finished(
        self, request: "Request", block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether its blocks are still needed, and what the router shall carry."""
        if self._loads is not None:
            self._loads.give_up(request.request_id)
        params = request.kv_transfer_params
        if self._offers is None or not params or not params.get(ASKS_TO_OFFER):
            return False, None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if request.status not in HANDS_OFF_AFTER or num_tokens == 0:
            self._offers.abandon(request.request_id)
            return False, None
        ticket = self._offers.publish(request.request_id, block_ids, num_tokens)
        if ticket is None:
            return False, None
        digest = _digest(request, num_tokens)
        return True, HandoffParams(ticket, num_tokens, digest).to_params()

    def step(self) -> StepResults:
        """What the workers shall report to vLLM in this step."""
        if self._loads is None or self._offers is None:
            return NOTHING
        failed, received = self._loads.take_failed(), self._loads.take_over()
        sent = self._offers.take_sent()
        if not (failed or received or sent):
            return NOTHING
        return StepResults(sent=sent, received=received, failed=failed)

    def take_figures(self) -> Figures | None:
        """What happened since the last call, for vLLM's statistics."""
        return self._tally.take()

    def close(self) -> None:
        """End the control session, and with it every load and offer."""
        if self._link is not None:
            self._link.close()


def ranks_elsewhere(workers: Sequence[WorkerIntroduction]) -> Mapping[str, tuple[int, ...]]:
    """The ranks whose agent is not that of the first, by its peer endpoint."""
    elsewhere: dict[str, tuple[int, ...]] = {}
    for worker in workers:
        if worker.peer_endpoint not in ("", workers[0].peer_endpoint):
            known = elsewhere.get(worker.peer_endpoint, ())
            elsewhere[worker.peer_endpoint] = (*known, worker.rank)
    return elsewhere


def _load_of(request: "Request", params: Mapping[str, Any]) -> Load:
    handoff, problem = None, ""
    try:
        handoff = read_params({k: v for k, v in params.items() if k not in (ASKS_TO_FETCH,)})
        _check_prompt(request, handoff)
    except ProtocolError as error:
        handoff, problem = None, error.message
    return Load(request.request_id, request.num_prompt_tokens, handoff, problem)


def _check_prompt(request: "Request", handoff: HandoffParams) -> None:
    num_tokens = handoff.remote_num_tokens
    if num_tokens > request.num_prompt_tokens:
        raise ProtocolError(
            f"the prefill engine computed {num_tokens} tokens, the prompt here has only "
            f"{request.num_prompt_tokens}: the router must send both the same request"
        )
    if _digest(request, num_tokens) != handoff.prompt_digest:
        raise ProtocolError(
            f"the first {num_tokens} tokens of the prompt, its LoRA, cache salt or images are not "
            "those of the prefill engine: the router must send both the same request"
        )


def _digest(request: "Request", num_tokens: int) -> str:
    conditions = [request.cache_salt or ""]
    if request.lora_request is not None:
        conditions.append(request.lora_request.lora_name)
    conditions += [feature.identifier for feature in request.mm_features]
    return prompt_digest(request.all_token_ids[:num_tokens], conditions)
