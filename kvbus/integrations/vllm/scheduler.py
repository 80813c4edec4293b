"""The connector's half in the scheduler's process, which starts and ends loads and offers.

           for a request                               for a step
on_new_request              Loads.expect         build_connector_meta     failures ──▶ workers
get_num_new_matched_tokens  Loads.matched        update_connector_output  Loads.take_loaded
update_state_after_alloc    Loads.start, Offers.reserve                   Offers.grow
request_finished            Loads.give_up, Offers.publish, or withdraw
"""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvbus.engine import AgentRole, Link, Offer
from kvbus.errors import GeometryError, ProtocolError
from kvbus.integrations.vllm.blocks import BlockReports
from kvbus.integrations.vllm.loads import Loads
from kvbus.integrations.vllm.offers import NULL_BLOCK, BlockIds, RequestOffers
from kvbus.integrations.vllm.params import (
    ASKS_TO_FETCH,
    ASKS_TO_OFFER,
    TICKET,
    TRANSFER_ID,
    ConnectorOptions,
    Description,
    HandoffParams,
    OfferParams,
    StepDone,
    StepResults,
    WorkerPlaces,
    adapter_of,
    digest_of,
    has_tokens,
    images_of,
    is_later_sequence,
    is_of_later_prompt,
    ranks_elsewhere,
    read_offer_params,
    read_trace,
)
from kvbus.integrations.vllm.stats import KvbusStats
from kvbus.integrations.vllm.steps import Steps

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.kvbus")

HANDS_OFF_AFTER = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
CLOSE_WITHIN_S = 3.0


class SchedulerSide:
    """Only `RequestOffers.publish` blocks."""

    def __init__(
        self,
        options: ConnectorOptions,
        caches: "KVCacheConfig",
        *,
        kv_role: str,
        drains: bool,
        takes_images: bool,
        num_left: int,
        has_states: bool,
        describe: Callable[[], Description],
    ) -> None:
        """``describe`` says what the configuration alone does."""
        self.takes_images, self._num_left, self._has_states = takes_images, num_left, has_states
        self._options, self._caches = options, caches
        self._kv_role, self._drains, self._describe = kv_role, drains, describe
        self._stats, self._steps = KvbusStats(), Steps()
        self._control_links: list[Link] = []

    # Start and shutdown

    def bind_kv_cache_manager(self, kv_cache_manager: "KVCacheManager") -> None:
        self._manager = kv_cache_manager

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        found = [one for one in metadata.values() if isinstance(one, WorkerPlaces)]
        workers, descriptions = [one.places for one in found], {one.described for one in found}
        if len(descriptions) > 1:
            raise GeometryError("the workers of this vLLM describe its KV cache differently")
        # `MultiConnector` passes on the metadata of its first child alone. If workers say more than
        # the configuration, the agent refuses the scheduler's session.
        described = descriptions.pop() if descriptions else self._describe()
        self._has_windows = any(group.window is not None for group in described.engine.groups)
        # A producer frees blocks that a running step may still write, so it must not load.
        only = AgentRole.PREFILL if self._kv_role == "kv_producer" else None
        for number, (path, role) in enumerate(self._options.agents):
            places = sorted((each[number] for each in workers), key=lambda place: place.ranks)
            remote_ranks = ranks_elsewhere(places)
            link = Link(
                path, described.engine, role=role or only, remote_ranks=remote_ranks, logger=logger
            )
            self._control_links.append(link.start())
        if len(found) == described.engine.num_ranks:
            self._steps.watch(page for each in found for page in each.pages)
        offering, loading = self._control_links[0], self._control_links[-1]
        self._loads = Loads(
            described,
            loading,
            self._stats,
            self._options,
            self._steps,
            num_left=self._num_left,
            zeroes_blocks=self._caches.needs_kv_cache_zeroing,
        )
        pool = self._manager.block_pool
        self._offers = RequestOffers(
            described,
            offering,
            pool,
            self._stats,
            self._steps,
            drains=self._drains,
            park=self._options.park,
        )
        self._blocks = BlockReports(described, offering, pool)

    def shutdown(self) -> None:
        for link in self._control_links:
            link.close(CLOSE_WITHIN_S)

    # For a request

    def on_new_request(self, request: "Request") -> None:
        self._poll_links()
        params = request.kv_transfer_params or {}
        asks_to_offer = bool(params.get(ASKS_TO_OFFER))
        if asks_to_offer and params.get(TICKET):
            self._loads.expect_turn(request, params)
        elif params.get(ASKS_TO_FETCH):
            self._loads.expect(request, params)
            self._end_refused(request)
        if asks_to_offer and self._num_left and self._is_for_decode(request):
            _leave_last_tokens(request, self._num_left)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the tokens to load (None: call again), and whether vLLM may step meanwhile."""
        if self._end_refused(request):
            return None, False
        if self._evict_partial():  # vLLM may just have found one of them for this request
            return None, False
        self._blocks.want(request.num_tokens)
        num_tokens = self._loads.matched(request.request_id, num_computed_tokens)
        return num_tokens, bool(num_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        group_ids: tuple[int, ...] = self._caches.transfer_group_ids
        return group_ids

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        block_ids = self._caches.select_transfer_block_ids(blocks.get_block_ids())
        self._blocks.fulfil()
        self._loads.start(request.request_id, block_ids, num_external_tokens)
        self._evict_partial()
        params = request.kv_transfer_params or {}
        is_offered = params.get(ASKS_TO_OFFER) and has_tokens(request)
        if is_offered and not is_of_later_prompt(request.request_id):
            self._reserve(request, params)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return False (`RequestOffers` holds the blocks, not vLLM), and the params."""
        ids: BlockIds = self._caches.select_transfer_block_ids(block_ids)
        partial_blocks = self._loads.partial_blocks(request.request_id)
        whole_blocks = not any(partial_blocks.intersection(each) for each in ids)
        self._loads.give_up(request.request_id)
        params = request.kv_transfer_params or {}
        ends_well = request.status in HANDS_OFF_AFTER and self._is_for_decode(request)
        if params.get(ASKS_TO_OFFER):
            # a reader that knows the name of the offer cannot learn of a gap
            if ends_well and (whole_blocks or not params.get(TRANSFER_ID)):
                return False, self._offer_prompt(request, ids, whole_blocks)
            self._offers.withdraw(request.request_id)
        elif params and ends_well and not is_of_later_prompt(request.request_id):
            return False, self._offer_answer(request, ids, whole_blocks)
        return False, None

    # For a step

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StepResults:
        self._evict_partial()
        self._poll_links()
        self._blocks.report(may_park=self._offers.may_park)
        for request_id in scheduler_output.preempted_req_ids or ():  # others reuse its blocks
            self._offers.take_back(request_id)
            self._loads.lose_blocks(request_id)
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        self._loads.note_computed(num_scheduled_tokens)
        number, step = self._steps.begin(), self._steps.latest
        is_reported = self._offers.schedule(step, num_scheduled_tokens)
        failed, over = self._loads.take_failed()
        reported = step if is_reported or self._loads.need_steps else 0
        return StepResults(failed, over, reported, number)

    # A failure must reach vLLM through a worker: vLLM handles failures before it calls this.
    # Successful loads are reported here, where vLLM looks next. A worker could report them no
    # sooner. vLLM calls this only if some worker reports something, such as `StepDone`.
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        self._poll_links()
        loaded = self._loads.take_loaded()
        connector_output.finished_recving = {*(connector_output.finished_recving or ()), *loaded}
        if isinstance(done := connector_output.kv_connector_worker_meta, StepDone):
            select, blocks_of = self._caches.select_transfer_block_ids, self._manager.get_block_ids
            self._offers.grow(done.step, lambda request_id: select(blocks_of(request_id)))

    def has_pending_block_frees(self) -> bool:
        """Return whether vLLM shall wait for blocks instead of preempting.

        Also True if blocks were freed just now.
        """
        before = self._manager.block_pool.get_num_free_blocks()
        self._poll_links()
        has_more = self._manager.block_pool.get_num_free_blocks() > before
        return has_more or self._offers.frees_soon(self._steps.latest)

    def has_pending_push_work(self) -> bool:
        return self._offers.need_steps

    def get_kv_connector_stats(self) -> KvbusStats | None:
        return self._stats.take()

    # vLLM treats every block that a load has filled as whole. If the beginning of a block was not
    # loaded, no other request may find the block: vLLM would read old data there. Its own request
    # continues with it. A partial block enters and leaves the prefix cache within one pass of
    # vLLM's scheduler:
    #
    #     running requests: given blocks     it enters, when its request has filled the rest of it
    #     waiting: the load has ended        it enters
    #              looked up in the cache
    #              `get_num_new_matched…`    it leaves; vLLM asks again, as it may have found it
    #              `update_state_after_…`    it leaves, so that vLLM rarely finds it
    #     `build_connector_meta`             it leaves
    #
    # A whole block with the same hash stays.
    def _evict_partial(self) -> bool:
        pool = self._manager.block_pool
        partial_ids = self._loads.partial_blocks()
        cached = {
            block_id for block_id in partial_ids if pool.blocks[block_id].block_hash is not None
        }
        pool.evict_blocks(cached)
        return bool(cached)

    def _end_refused(self, request: "Request") -> bool:
        reason = self._loads.refusal(request.request_id, takes_images=self.takes_images)
        if reason:
            _end_with_error(request, reason)
        return bool(reason)

    def _is_for_decode(self, request: "Request") -> bool:
        """For log probabilities of the prompt, prefill computes the last token, too.

        With windows or states, that makes the KV useless to decode.
        """
        skips = self._num_left > 0 and request.get_skip_reading_prefix_cache()
        return has_tokens(request) and not skips

    def _poll_links(self) -> None:
        for link in self._control_links:
            for ended in link.ended():
                if isinstance(ended, Offer):
                    self._offers.end(ended)
                else:
                    self._loads.end(ended)

    # Offers

    def _reserve(self, request: "Request", params: Mapping[str, Any]) -> None:
        """An offer with a router's name is readable during computation.

        With windows or states it is not, as these leave tokens behind. Only the first of several
        sequences is named.
        """
        try:
            options = read_offer_params(params)
        except ProtocolError as error:
            logger.error("kvbus: request %s: %s", request.request_id, error.message)
            options = OfferParams()
        is_named = options.transfer_id is not None
        if is_named and is_later_sequence(request.request_id):
            return
        self._offers.reserve(
            request,
            request.num_prompt_tokens,
            grows=is_named and not (self._has_windows or self._has_states),
            transfer_id=options.transfer_id,
            readers=options.readers,
            ttl_s=self._options.offer_ttl_s,
            traceparent=read_trace(params, request.trace_headers),
        )

    def _offer_prompt(
        self, request: "Request", block_ids: BlockIds, whole_blocks: bool
    ) -> dict[str, Any] | None:
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        if num_tokens == 0:
            self._offers.withdraw(request.request_id)
            return None
        ticket = self._offers.publish(request.request_id, block_ids, num_tokens)
        if ticket is None:
            return None
        is_all = num_tokens == request.num_prompt_tokens
        digest = ticket["prompt_digest"] if is_all else digest_of(request, num_tokens)
        images, adapter = images_of(request, num_tokens), adapter_of(request)
        return HandoffParams(ticket, num_tokens, digest, images, whole_blocks, adapter).to_params()

    def _offer_answer(
        self, request: "Request", block_ids: BlockIds, whole_blocks: bool
    ) -> dict[str, Any] | None:
        """Return the params of the next turn's prefill request; a stream has no place for them.

        A step that was scheduled ahead may compute the last token, so it is left out.
        """
        sampling = request.sampling_params
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        is_streamed = sampling is None or sampling.output_kind is RequestOutputKind.DELTA
        if not self._options.bidirectional_kv_xfer or is_streamed or num_tokens == 0:
            return None
        max_blocks = int(self._options.decoder_kv_blocks_share * self._caches.num_blocks)
        num_blocks = sum(block != NULL_BLOCK for ids in block_ids for block in ids)
        if num_blocks > max_blocks:
            logger.info(
                "kvbus: request %s: its answer is not kept for the next turn: it has %s blocks, "
                "all answers may have %s (decoder_kv_blocks_share)",
                request.request_id,
                num_blocks,
                max_blocks,
            )
            return None
        ttl_s = self._options.decoder_kv_blocks_ttl
        self._offers.reserve(request, num_tokens, is_answer=True, ttl_s=ttl_s)
        ticket = self._offers.publish(request.request_id, block_ids, num_tokens)
        if ticket is None:
            return None
        self._offers.bound_answers(max_blocks)
        images, adapter = images_of(request, num_tokens), adapter_of(request)
        digest = ticket["prompt_digest"]
        params = HandoffParams(ticket, num_tokens, digest, images, whole_blocks, adapter)
        return params.to_params(next_turn=True)


# `kv_load_failure_policy` is one setting for the whole server. With "recompute", vLLM has no call
# that fails one request. But vLLM ends a request with an error if its grammar failed to compile. It
# checks this whenever it considers the request, before it computes anything.
def _end_with_error(request: "Request", reason: str) -> None:
    refused = StructuredOutputRequest(StructuredOutputsParams(json_object=True))
    refused.grammar = ProtocolError(reason)
    request.structured_output_request = refused
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def _leave_last_tokens(request: "Request", num_left: int) -> None:
    """Make prefill compute all but the last ``num_left`` tokens of the prompt.

    Decode computes the last one in any case, for its logits. With a sliding window, it needs an
    earlier token. If this is the last of its block, vLLM frees the block once prefill computes the
    last token. MTP modules of prefill would fill their KV of the last tokens from guesses.
    """
    if request.num_prompt_tokens > num_left:
        del request.prompt_token_ids[-num_left:]
        del request._all_token_ids[-num_left:]
        request.num_prompt_tokens -= num_left
        request.max_tokens = 1
