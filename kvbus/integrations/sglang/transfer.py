"""SGLang's senders and receivers: a request's room names its offer, which decode awaits.

prefill   Sender ── offer, extend, seal ─▶ agents ◀── fetch ── Receiver   decode
          poll ◀─ released                           ended, freed ─▶ poll

One rank of each side acts for all; SGLang takes the lowest state of all ranks. A request never
reports failure while an agent may still access its pages.
"""

from __future__ import annotations

import logging
import os
from asyncio import new_event_loop, run_coroutine_threadsafe
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Thread
from time import monotonic
from typing import Any

import msgspec
from aiohttp import ClientSession, ClientTimeout, web
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
    PrefillServerInfo,
)

from kvbus.engine import Fetch, Link, Offer, Rendezvous, prompt_digest, query_agent
from kvbus.errors import KVBusError, ProtocolError, reason_of
from kvbus.integrations.sglang import pools
from kvbus.integrations.sglang.options import Options
from kvbus.protocol.engine import AgentRole, Outcome

logger = logging.getLogger("sglang.kvbus")

PLACE = "/kvbus"
ELSEWHERE = "kvbus"
"""``bootstrap_host`` of a request that another engine than SGLang has prefilled."""
PARAMS_KEY = "kvbus"
PLACE_TIMEOUT_S = 5.0
RETRY_PLACE_AFTER_S = 1.0
MAX_PLACES = 4096
MAX_NOTED = 65_536


class TicketAndToken(msgspec.Struct, frozen=True):
    ticket: dict[str, Any]
    first_token: int
    first_logprob: float | None = None


@dataclass(frozen=True)
class RequestFacts:
    """Facts that SGLang does not pass to senders and receivers.

    ``untold`` names options that need more than `TicketAndToken` has.
    """

    num_tokens: int
    digest: str
    given: object
    wants_logprobs: bool
    untold: Sequence[str]


class AgentPlace(msgspec.Struct):
    endpoint: str
    server_key: str = ""
    http_port: int | None = None


class PlaceRequest:
    def __init__(self, bootstrap_addr: str, answer: Future[AgentPlace]) -> None:
        self._bootstrap_addr, self._ended_at = bootstrap_addr, 0.0
        self._place: AgentPlace | None = None
        self._error = ""
        answer.add_done_callback(self._note_end)

    def _note_end(self, answer: Future[AgentPlace]) -> None:
        error, self._ended_at = answer.exception(), monotonic()
        if error is None:
            self._place = answer.result()
        else:
            self._error = str(error) or type(error).__name__

    @property
    def may_retry(self) -> bool:
        return bool(self._error) and monotonic() - self._ended_at > RETRY_PLACE_AFTER_S

    def place(self) -> AgentPlace | None:
        """Return None before the answer; raise `KVBusError` if the request failed."""
        if self._error:
            raise KVBusError(
                f"the bootstrap server {self._bootstrap_addr} does not name its agent: "
                f"{self._error}; start that server with --disaggregation-transfer-backend kvbus, "
                "and its agent"
            )
        return self._place


_facts_by_room: OrderedDict[int, RequestFacts] = OrderedDict()


def note_request(manager: Manager, request: Any) -> None:
    tokens = list(request.origin_input_ids)
    if manager.is_decode and manager.window is not None and len(tokens) > manager.window:
        # SGLang allocates more pages than the window fills, and would cache all of them as valid.
        request.skip_radix_cache_insert = True
    custom = request.sampling_params.custom_params
    _facts_by_room[request.bootstrap_room] = RequestFacts(
        num_tokens=len(tokens),
        digest=prompt_digest(tokens, [manager.lora_name(request.lora_id)]),
        given=custom.get(PARAMS_KEY) if isinstance(custom, Mapping) else None,
        wants_logprobs=request.return_logprob,
        untold=[
            *["top_logprobs_num"] * bool(request.logprob.top_logprobs_num),
            *["return_sampling_mask"] * bool(request.return_sampling_mask),
        ],
    )
    while len(_facts_by_room) > MAX_NOTED:
        _facts_by_room.popitem(last=False)


def _windows(state_indices: Sequence[Any] | None) -> dict[str, list[int]]:
    """Return the pages of a window, the only state that startup accepts."""
    return {pools.WINDOW: state_indices[0].tolist()} if state_indices else {}


def rendezvous_of(place: AgentPlace, room: int) -> dict[str, Any]:
    named = Rendezvous(
        transfer_id=name_of(room),
        endpoint=place.endpoint,
        server_key=place.server_key,
        request_id=f"room-{room}",
    )
    return named.to_json()


def name_of(room: int) -> str:
    """A room has 63 random bits."""
    return f"sglang-room-{room:016x}"


class Manager(CommonKVManager):
    leads = False
    is_decode = False
    window: int | None = None
    link: Link
    scheduler: Any

    def begin(self, queue: Any) -> None:
        """Attach without waiting for the agent. Raises `ConfigError`."""
        options, rank_pools = Options.of_environment(), pools.pools_of(queue)
        role = AgentRole(self.disaggregation_mode.value)
        engine = rank_pools.engine(
            options.engine_id or f"sglang-{role}-{os.getppid()}",
            options.model or self.server_args.served_model_name or self.server_args.model_path,
        )
        self.leads = pools.leads()
        self.is_decode = role is AgentRole.DECODE
        self.window = next((group.window for group in engine.groups if group.window), None)
        self.rows = queue.metadata_buffers
        self.scheduler = queue.scheduler
        self.places: dict[str, PlaceRequest] = {}
        if self.is_decode and self.leads:
            self._http_loop = new_event_loop()
            Thread(target=self._http_loop.run_forever, name="kvbus-places", daemon=True).start()
        self.link = Link(
            options.attach,
            engine,
            memory=rank_pools.share(engine),
            control=self.leads,
            role=role,
            logger=logger,
        ).start()

    def lora_name(self, lora_id: str | None) -> str:
        """Return the adapter's name: its id differs between servers."""
        return (self.scheduler.kv_event_lora_names.resolve(lora_id) or lora_id) if lora_id else ""

    def request_place(self, bootstrap_addr: str) -> PlaceRequest:
        request = self.places.get(bootstrap_addr)
        if request is None or request.may_retry:
            answer = run_coroutine_threadsafe(self._place_at(bootstrap_addr), self._http_loop)
            request = self.places[bootstrap_addr] = PlaceRequest(bootstrap_addr, answer)
        return request

    async def _place_at(self, bootstrap_addr: str) -> AgentPlace:
        timeout = ClientTimeout(total=PLACE_TIMEOUT_S)
        async with (
            ClientSession(timeout=timeout, raise_for_status=True) as session,
            session.get(f"http://{bootstrap_addr}{PLACE}") as response,
        ):
            place = msgspec.json.decode(await response.read(), type=AgentPlace)
        if (info := self.prefill_info_table.get(bootstrap_addr)) is not None:
            info.prefill_http_port = place.http_port
        return place

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return True: the agents compare the engines.

        Requests the agent's place early, as SGLang allocates pages later.
        """
        table = self.prefill_info_table
        if bootstrap_addr not in table:
            if len(table) >= MAX_PLACES:
                self.places.pop(oldest := next(iter(table)), None)
                del table[oldest]
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
            self.request_place(bootstrap_addr)
        return True

    def write_row(self, row: int, room: int, given: TicketAndToken) -> None:
        rows = self.rows
        rows.cached_tokens[row] = 0
        rows.output_ids[row, 0] = rows.output_token_logprobs_idx[row, 0] = given.first_token
        rows.output_token_logprobs_val[row, 0] = given.first_logprob or 0.0
        rows.bootstrap_room[row, 0] = room

    def remove_place(self, bootstrap_addr: str) -> None:
        self.places.pop(bootstrap_addr, None)


class BootstrapServer(CommonKVBootstrapServer):
    def _setup_routes(self) -> None:
        super()._setup_routes()
        self.app.router.add_get(PLACE, self._reply_with_place)

    async def _reply_with_place(self, _: web.Request) -> web.Response:
        try:
            agent = await query_agent(Options.of_environment().attach)
        except KVBusError as error:
            return web.Response(text=f"no agent: {error.message}", status=503)
        place = AgentPlace(agent.peer_endpoint, agent.server_key, self.prefill_http_port)
        return web.json_response(msgspec.to_builtins(place))


class Sender(CommonKVSender):
    """An offer that grows with each chunk.

    A request that is aborted before `init` makes its offer and withdraws it, to notify decode.
    """

    kv_mgr: Manager
    conclude_state: Any
    _early_send_wait_event: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._offer: Offer | None = None
        self._facts = _facts_by_room.pop(self.bootstrap_room, None)
        self._unsent: list[int] = []
        self._windows: dict[str, list[int]] = {}
        self._writes: list[Any] = []
        """Events of steps that may still write to unsent pages."""
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
            transfer_id=name_of(room),
            prompt_digest=self._facts.digest if self._facts else "",
            ttl_s=self.kv_mgr.bootstrap_timeout,
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
        self._extend_offer()  # what was sent before has another event
        self.curr_idx += len(kv_indices)
        self._has_all = self.curr_idx == self.num_kv_indices
        events, self._early_send_wait_event = [self._early_send_wait_event], None
        if not self._has_all:
            events.append(getattr(self.kv_mgr.scheduler, "launch_event", None))
        self._writes += [event for event in events if event is not None]
        self._record_transfer_indices(kv_indices, state_indices)
        self._unsent += kv_indices.tolist()
        self._windows = _windows(state_indices)
        self._extend_offer()

    # SGLang sends some pages while a step may still write to them. With overlap scheduling these
    # are a cached prefix, before the next step is launched. With pipeline stages they are a chunk,
    # once its own step is launched.
    #
    #   GPU        ── step that writes ─────▶ event ── next step ──▶
    #   scheduler       send(prefix, event)                           send(the rest)
    #
    # Decode may read pages as soon as they are reported, so they wait here for the event. The
    # all-reduces of a step keep the ranks together, so the event of this rank stands for all.
    def _extend_offer(self) -> None:
        self._writes = [event for event in self._writes if not event.query()]
        manager, pages, windows = self.kv_mgr, self._unsent, self._windows
        if self._writes or self._is_sealed or not (pages or self._has_all):
            return
        if manager.window is not None and not self._has_all:
            return  # the pages of the window come with the last ones
        self._unsent, self._is_sealed = [], self._has_all
        if self._offer is None or self._is_given_up:
            return
        num_tokens = self.curr_idx * manager.kv_args.page_size
        if self._has_all and self._facts:
            num_tokens = self._facts.num_tokens
        self._offer.extend(
            num_tokens,
            {pools.FULL: pages, **windows},
            first_blocks={name: self.curr_idx - len(ids) for name, ids in windows.items()},
        )
        if self._has_all:
            self._offer.seal()

    def poll(self) -> Any:
        if self.conclude_state is None:
            self._extend_offer()
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
        if error is None and self._offer.outcome is Outcome.COMPLETED:
            return KVPoll.Success
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
        self._facts = _facts_by_room.pop(self.bootstrap_room, None)
        self._fetch: Fetch | None = None
        self._place: PlaceRequest | None = None
        self._start_fetch: Callable[[Mapping[str, Any]], Fetch] | None = None
        self._has_metadata = False

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
        tables = {pools.FULL: kv_indices.tolist(), pools.METADATA: rows, **_windows(state_indices)}
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
                self._place = self.kv_mgr.request_place(self.bootstrap_addr)
            self._start_fetch = partial(
                self.kv_mgr.link.fetch,
                num_tokens=num_tokens,
                first_token=min(first_token, num_tokens),
                block_ids=tables,
                timeout_s=self.kv_mgr.waiting_timeout,
                prompt_digest=self._facts.digest if self._facts else "",
            )
        except KVBusError as error:
            self._fail(str(error))
        self._fetch_soon()

    def _fetch_soon(self) -> None:
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
        untold = list(facts.untold) if facts else []
        if facts and facts.wants_logprobs and given.first_logprob is None:
            untold.append("return_logprob without first_logprob")
        if untold:
            if self.kv_mgr.leads:
                self.kv_mgr.link.release(given.ticket)
            raise ProtocolError(
                f"custom_params['{PARAMS_KEY}'] does not tell this of the first token: "
                f"{', '.join(untold)}"
            )
        return given

    def _ticket(self) -> dict[str, Any] | None:
        given = self._given()
        if given is not None:
            return given.ticket
        request = self._place or self.kv_mgr.places.get(self.bootstrap_addr)
        place = request.place() if request is not None else None
        return rendezvous_of(place, self.bootstrap_room) if place is not None else None

    def poll(self) -> Any:
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
            self.kv_mgr.remove_place(self.bootstrap_addr)
        if notice.outcome is not Outcome.CANCELLED:
            self.kv_mgr.link.release(fetch.ticket)
        self._fail(f"kvbus: {notice.message} [{notice.code}]")
        return self.conclude_state

    def abort(self) -> None:
        """Cancel the fetch; `poll` returns Failed once nothing writes into the pages."""
        if self.conclude_state is not None:
            return
        if self._fetch is not None:
            self._fetch.cancel(release_offer=True)
        elif self.kv_mgr.leads:
            try:
                ticket = self._ticket()
                if ticket is not None:
                    self.kv_mgr.link.release(ticket)
            except KVBusError as error:
                logger.warning("kvbus: room %s is not released: %s", self.bootstrap_room, error)
            self._fail("aborted")

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
