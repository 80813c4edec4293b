"""SGLang's senders and receivers: a request's room names its offer, which decode awaits.

prefill   Sender ── offer, extend, seal ─▶ agents ◀── fetch ── Receiver   decode
          poll ◀─ released                           ended, freed ─▶ poll

One rank of each side acts for all; SGLang takes the lowest state of all ranks. A request never
reports failure while an agent may still access its pages.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import RLock
from typing import Any

import msgspec
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    PrefillServerInfo,
)

from kvbus.engine import Fetch, Link, Offer, Rendezvous
from kvbus.errors import KVBusError, ProtocolError, reason_of
from kvbus.integrations.sglang import pools
from kvbus.integrations.sglang.facts import PARAMS_KEY, Requests, TicketAndToken, name_of
from kvbus.integrations.sglang.options import Options
from kvbus.integrations.sglang.pages import PageReports
from kvbus.integrations.sglang.places import BootstrapServer, PlaceRequest, Places
from kvbus.integrations.sglang.steps import ATTRIBUTE, LaunchedSteps
from kvbus.protocol.engine import AgentRole, Outcome, Park

logger = logging.getLogger("sglang.kvbus")

ELSEWHERE = "kvbus"
"""``bootstrap_host`` of a request that another engine than SGLang has prefilled."""
MAX_PLACES = 4096


class Manager(CommonKVManager):
    leads = False
    is_decode = False
    window: int | None = None
    link: Link
    scheduler: Any

    def begin(self, queue: Any) -> None:
        """Attach without waiting for the agent. Raises `ConfigError`."""
        options = Options.of_environment()
        rank_pools = pools.pools_of(queue, self.kv_args.state_types)
        role = AgentRole(self.disaggregation_mode.value)
        engine = rank_pools.engine(
            (options.engine_id or f"sglang-{role}-{os.getppid()}") + pools.replica_suffix(),
            options.model or self.server_args.served_model_name or self.server_args.model_path,
        )
        self.leads = pools.leads()
        self.is_decode = role is AgentRole.DECODE
        self.window = next((group.window for group in engine.groups if group.window), None)
        names = {group.name for group in engine.groups}
        self.paged, self.has_states = names & pools.PAGED, bool(names & pools.OTHER_BLOCKS)
        self.rows, self.requests = queue.metadata_buffers, Requests(self)
        self.scheduler, self.park = queue.scheduler, options.park
        if self.is_decode:
            self.places = Places(self.prefill_info_table)
        self.link = Link(
            options.attach,
            engine,
            memory=rank_pools.share(engine),
            control=self.leads,
            role=role,
            logger=logger,
        ).start()
        self.steps = LaunchedSteps(self.link, self.scheduler)
        reports = self.leads and not self.is_decode and self.park is Park.WHEN_FULL
        self.pages = PageReports(self.link, self.scheduler) if reports else None
        setattr(self.scheduler, ATTRIBUTE, self.steps)

    def lora_name(self, lora_id: str | None) -> str:
        """Return the adapter's name: its id differs between servers."""
        return (self.scheduler.kv_event_lora_names.resolve(lora_id) or lora_id) if lora_id else ""

    def states(self, state_indices: Sequence[Any] | None) -> dict[str, list[int]]:
        """Return the tables of groups that have other blocks than the pages of all layers."""
        kinds = self.kv_args.state_types if state_indices else ()
        return {
            pools.STATES[kind]: [int(one) for one in blocks]
            for kind, blocks in zip(kinds, state_indices or (), strict=True)
            if kind in pools.STATES
        }

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return True: the agents compare the engines.

        Requests the agent's place early, as SGLang allocates pages later.
        """
        table = self.prefill_info_table
        if bootstrap_addr not in table:
            if len(table) >= MAX_PLACES:
                del table[oldest := next(iter(table))]
                self.places.pop(oldest, None)
            table[bootstrap_addr] = PrefillServerInfo(
                attn_tp_size=self.attn_tp_size,
                attn_cp_size=1,
                dp_size=1,
                pp_size=1,
                page_size=None,
                kv_cache_dtype=None,
                follow_bootstrap_room=True,
            )
        if self.leads and not bootstrap_addr.startswith(f"{ELSEWHERE}:"):
            self.places.request(bootstrap_addr)
        return True

    def write_row(self, row: int, room: int, given: TicketAndToken) -> None:
        rows = self.rows
        rows.cached_tokens[row] = 0
        rows.output_ids[row, 0] = rows.output_token_logprobs_idx[row, 0] = given.first_token
        rows.output_token_logprobs_val[row, 0] = given.first_logprob or 0.0
        rows.bootstrap_room[row, 0] = room


class Sender(CommonKVSender):
    """An offer that grows with each chunk.

    A request that is aborted before `init` makes its offer and withdraws it, to notify decode.
    """

    kv_mgr: Manager
    conclude_state: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._offer: Offer | None = None
        self._facts = self.kv_mgr.requests.take(self.bootstrap_room)
        self._unsent: list[int] = []
        self._states: dict[str, list[int]] = {}
        self._has_all = self._is_sealed = self._is_given_up = False

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        super().init(num_kv_indices, aux_index)
        if self.kv_mgr.leads:
            self._offer = self._make_offer()

    def _make_offer(self) -> Offer:
        room = self.bootstrap_room
        return self.kv_mgr.link.offer(
            f"room-{room}",
            num_tokens=0,
            block_ids={} if self.aux_index is None else {pools.METADATA: [self.aux_index]},
            sealed=False,
            transfer_id=self._facts.transfer_id if self._facts else name_of(room),
            prompt_digest=self._facts.digest if self._facts else "",
            ttl_s=self.kv_mgr.bootstrap_timeout,
            park=self.kv_mgr.park,
        )

    def send(
        self,
        kv_indices: Any,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        indices_event: Any = None,
    ) -> None:
        if self.conclude_state is not None:
            return
        if indices_event is not None:
            indices_event.synchronize()  # until then a stream copies the indices to the host
        self.curr_idx += len(kv_indices)
        self._has_all = self.curr_idx == self.num_kv_indices
        self._record_transfer_indices(kv_indices, state_indices)
        self._unsent += kv_indices.tolist()
        self._states = self.kv_mgr.states(state_indices)
        self._extend_offer()

    # SGLang sends some pages while a step may still write to them. With overlap scheduling these
    # are a cached prefix, before the next step is launched. With pipeline stages they are a chunk,
    # once its own step is launched.
    #
    #   GPU        ── step 7, which writes ────▶ 7 ── step 8 ──▶ 8
    #   scheduler       send(prefix, after 7)             send(the rest, after 8)
    #
    # Decode may read pages as soon as they are reported, so the agent reports them behind the step.
    def _extend_offer(self) -> None:
        manager, pages, states = self.kv_mgr, self._unsent, self._states
        if self._is_sealed or not (pages or self._has_all):
            return
        if manager.has_states and not self._has_all:
            return  # their blocks come with the last pages
        self._unsent, self._is_sealed = [], self._has_all
        if self._offer is None or self._is_given_up:
            return
        num_tokens = self.curr_idx * manager.kv_args.page_size
        if self._has_all and self._facts:
            num_tokens = self._facts.num_tokens
        tables = {**dict.fromkeys(manager.paged, pages), **states}
        windows = states.keys() & {pools.WINDOW}
        first_blocks = {name: self.curr_idx - len(states[name]) for name in windows}
        after = manager.steps.written
        self._offer.extend(num_tokens, tables, first_blocks=first_blocks, after=after)
        if self._has_all:
            self._offer.seal(after=after)

    def poll(self) -> Any:
        if self.kv_mgr.pages is not None:
            self.kv_mgr.pages.report()
        if self.conclude_state is None:
            self.conclude_state = self._final_state()
        if self.conclude_state is not None:
            return self.conclude_state
        return KVPoll.Transferring if self._is_sealed else KVPoll.WaitingForInput

    def poll_pp_consensus(self) -> Any:
        """Called only in the first pipeline stage, for all stages, before any `send`."""
        return KVPoll.Failed if self._is_given_up else self.poll()

    def _final_state(self) -> Any:
        if not self.kv_mgr.leads:
            return KVPoll.Success if self._is_sealed else None
        if self._offer is None or not self._offer.ended.done():
            return None
        error = self._offer.ended.exception()
        if error is None and self._offer.outcome in (Outcome.COMPLETED, Outcome.PARKED):
            return KVPoll.Success  # no agent reads its pages any more
        why = error if error is not None else f"the offer is {self._offer.outcome}"
        self.kv_mgr.record_failure(self.bootstrap_room, f"kvbus: {why}")
        return KVPoll.Failed

    def abort(self) -> None:
        """Withdraw the offer; `poll` returns Failed once no agent can read the pages."""
        if self.conclude_state is not None:
            return
        self._is_given_up = True
        if not self.kv_mgr.leads:
            return
        if self._offer is None:
            self._offer = self._make_offer()
        self._offer.withdraw()


class Receiver(CommonKVReceiver):
    kv_mgr: Manager
    conclude_state: Any
    bootstrap_infos: Sequence[Any] = ()
    """Empty: SGLang's own sockets send nothing."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._facts = self.kv_mgr.requests.take(self.bootstrap_room)
        self._fetch: Fetch | None = None
        self._place: PlaceRequest | None = None
        self._start_fetch: Callable[[Mapping[str, Any]], Fetch] | None = None
        self._has_metadata = False
        self._is_held = not self.kv_mgr.leads
        self._starting = RLock()
        """SGLang may abort in another thread, while `poll` starts the fetch."""

    def init(self, prefill_dp_rank: int) -> None:
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.WaitingForInput)

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        self._has_metadata = True
        first_token, rows = decode_prefix_len or 0, [] if aux_index is None else [aux_index]
        tables = dict.fromkeys(self.kv_mgr.paged, kv_indices.tolist())
        tables |= {pools.METADATA: rows, **self.kv_mgr.states(state_indices)}
        num_tokens = first_token + len(kv_indices) * self.kv_mgr.kv_args.page_size
        if self._facts is not None:
            num_tokens = self._facts.num_tokens
        try:
            if (given := self._given()) is not None and aux_index is not None:
                self.kv_mgr.write_row(aux_index, self.bootstrap_room, given)
                tables[pools.METADATA] = []  # that engine has no such rows
            if not self.kv_mgr.leads:
                return
            if given is None:
                self._place = self.kv_mgr.places.request(self.bootstrap_addr)
            self._start_fetch = partial(
                self.kv_mgr.link.fetch,
                num_tokens=num_tokens,
                first_token=min(first_token, num_tokens),
                block_ids=tables,
                timeout_s=self.kv_mgr.waiting_timeout,
                prompt_digest=self._facts.digest if self._facts else "",
                after=self.kv_mgr.steps.in_flight,
            )
        except KVBusError as error:
            self._fail(str(error))
        self._fetch_soon()

    def _hold_soon(self) -> None:
        """Hold the offer while the request waits for pages; the agent's place may come later."""
        if self._is_held or self._has_metadata or self.conclude_state is not None:
            return
        try:
            ticket = self._ticket()
        except KVBusError:  # `_fetch_soon` reports it
            self._is_held = True
            return
        if ticket is not None:
            self.kv_mgr.link.hold(ticket)
            self._is_held = True

    def _fetch_soon(self) -> None:
        with self._starting:
            if self._start_fetch is None or self.conclude_state is not None:
                return
            try:
                ticket = self._ticket()
                if ticket is not None:
                    self._fetch, self._start_fetch = self._start_fetch(ticket), None
            except KVBusError as error:
                self._fail(str(error))

    def _given(self) -> TicketAndToken | None:
        if not self.bootstrap_addr.startswith(f"{ELSEWHERE}:"):
            return None
        facts = self._facts
        try:
            given = msgspec.convert(facts.given if facts else None, TicketAndToken)
        except msgspec.ValidationError as error:
            raise ProtocolError(
                f"custom_params['{PARAMS_KEY}']: {reason_of(error)}; bootstrap_host '{ELSEWHERE}' "
                "needs the ticket and the first token of the engine that prefilled"
            ) from error
        unknown = list(facts.unknown) if facts else []
        if facts and facts.wants_logprobs and given.first_logprob is None:
            unknown.append("return_logprob without first_logprob")
        if unknown:
            if self.kv_mgr.leads:
                self.kv_mgr.link.release(given.ticket)
            raise ProtocolError(
                f"custom_params['{PARAMS_KEY}'] lacks this of the first token: {', '.join(unknown)}"
            )
        return given

    def _ticket(self) -> dict[str, Any] | None:
        given = self._given()
        if given is not None:
            return given.ticket
        request = self._place or self.kv_mgr.places.get(self.bootstrap_addr)
        place = request.place() if request is not None else None
        if place is None:
            return None
        room = self.bootstrap_room
        return Rendezvous(
            transfer_id=self._facts.transfer_id if self._facts else name_of(room),
            endpoint=place.endpoint,
            server_key=place.server_key,
            request_id=f"room-{room}",
        ).to_json()

    def poll(self) -> Any:
        self._hold_soon()
        self._fetch_soon()
        if self.conclude_state is None:
            self.conclude_state = self._final_state()
        if self.conclude_state is not None:
            return self.conclude_state
        return KVPoll.Transferring if self._has_metadata else KVPoll.WaitingForInput

    def _final_state(self) -> Any:
        if not self.kv_mgr.leads:
            return KVPoll.Success if self._has_metadata else None
        fetch = self._fetch
        if fetch is None or fetch.notice is None or not fetch.are_blocks_free:
            return None
        notice = fetch.notice
        if notice.outcome is Outcome.COMPLETED:
            return KVPoll.Success
        if notice.code in ("peer_unreachable", "peer_lost"):
            self.kv_mgr.places.pop(self.bootstrap_addr, None)
        if notice.outcome is not Outcome.CANCELLED:
            self.kv_mgr.link.release(fetch.ticket)
        self._fail(f"kvbus: {notice.message} [{notice.code}]")
        return self.conclude_state

    def abort(self) -> None:
        """Cancel the fetch; `poll` returns Failed once nothing writes into the pages."""
        with self._starting:
            if self.conclude_state is not None:
                return
            if self._fetch is not None:
                self._fetch.cancel(release_offer=True)
            elif self.kv_mgr.leads:
                self._release()
                self._fail("aborted")

    def _release(self) -> None:
        try:
            ticket = self._ticket()
            if ticket is not None:
                self.kv_mgr.link.release(ticket)
        except KVBusError as error:
            logger.warning("kvbus: room %s is not released: %s", self.bootstrap_room, error)

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """Do nothing: the agents notify each other."""

    def _fail(self, why: str) -> None:
        self.kv_mgr.record_failure(self.bootstrap_room, why)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
        self.conclude_state = KVPoll.Failed


CLASSES = {
    "manager": Manager,
    "sender": Sender,
    "receiver": Receiver,
    "bootstrap_server": BootstrapServer,
}
