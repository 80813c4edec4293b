"""Facts of requests that SGLang does not pass to senders and receivers, by room."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvbus.engine import prompt_digest

if TYPE_CHECKING:
    from kvbus.integrations.sglang.transfer import Manager

PARAMS_KEY = "kvbus"
MAX_NOTED = 65_536


class TicketAndToken(msgspec.Struct, frozen=True):
    ticket: dict[str, Any]
    first_token: int
    first_logprob: float | None = None


@dataclass(frozen=True)
class RequestFacts:
    """``unknown`` names options that need more than `TicketAndToken` has."""

    transfer_id: str
    num_tokens: int
    digest: str
    given: object
    wants_logprobs: bool
    unknown: Sequence[str]


# A request that decode retracts for new weights has its room a second time. Decode has its tokens
# so far, without the last one. Prefill gets them as another request's prompt.
#
#   pause, update weights, continue      decode ── /generate(prompt + output, room) ──▶ prefill
#                                           └──────── fetch of the room's 2nd offer ───────┘
class Requests:
    """Facts by room, of one manager."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager
        self._facts: OrderedDict[int, RequestFacts] = OrderedDict()
        self._num_uses: OrderedDict[int, int] = OrderedDict()

    def note(self, request: Any) -> None:
        manager, room, tokens = self._manager, request.bootstrap_room, [*request.origin_input_ids]
        if getattr(request, "pd_rebootstrap_in_progress", False):
            tokens += request.output_ids
        if manager.is_decode and manager.window is not None and len(tokens) > manager.window:
            # SGLang allocates more pages than the window fills, and would cache all as valid.
            request.skip_radix_cache_insert = True
        custom, num_uses = request.sampling_params.custom_params, self._num_uses.pop(room, 0)
        self._num_uses[room] = num_uses + 1
        self._facts[room] = RequestFacts(
            transfer_id=name_of(room) + (f"-{num_uses}" if num_uses else ""),
            num_tokens=len(tokens),
            digest=prompt_digest(tokens, [manager.lora_name(request.lora_id)]),
            given=custom.get(PARAMS_KEY) if isinstance(custom, Mapping) else None,
            wants_logprobs=request.return_logprob,
            unknown=[
                *["top_logprobs_num"] * bool(request.logprob.top_logprobs_num),
                *["return_sampling_mask"] * bool(request.return_sampling_mask),
            ],
        )
        for table in (self._facts, self._num_uses):
            while len(table) > MAX_NOTED:
                table.popitem(last=False)

    def take(self, room: int) -> RequestFacts | None:
        return self._facts.pop(room, None)


def name_of(room: int) -> str:
    """A room has 63 random bits."""
    return f"sglang-room-{room:016x}"
