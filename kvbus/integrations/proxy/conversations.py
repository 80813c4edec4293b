"""The tickets that answers came with, each until its conversation's next turn takes it.

Refuses to trust a client further than a name: what it names is of its own prompt, or loads nothing.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from kvbus.integrations.proxy.bodies import (
    CONVERSATION_ID,
    TRANSFER_PARAMS,
    NotServed,
    TransferParams,
)

LONGEST_CONVERSATION_ID = 256
MAX_CONVERSATIONS = 10_000
"""Of more the oldest are forgotten: their next turn is prefilled as a first one is."""


class Conversations:
    """What the next turn of each conversation shows to its prefill server."""

    def __init__(self) -> None:
        self._params: OrderedDict[str, TransferParams] = OrderedDict()

    def take(self, conversation_id: str | None) -> TransferParams | None:
        """What the last answer came with; a ticket is good once."""
        return self._params.pop(conversation_id, None) if conversation_id else None

    def keeper(self, conversation_id: str | None) -> Callable[[bytes], None] | None:
        """What is to be shown the answer of a conversation; None for a request without one."""
        return partial(self._keep, conversation_id) if conversation_id else None

    def _keep(self, conversation_id: str, answer: bytes) -> None:
        """Keep what ``answer`` has for the next turn, if it does."""
        try:
            params = json.loads(answer)[TRANSFER_PARAMS]
        except (ValueError, RecursionError, LookupError, TypeError):
            return
        if isinstance(params, dict) and params.get("do_remote_decode"):
            self._params[conversation_id] = params
            self._params.move_to_end(conversation_id)
            if len(self._params) > MAX_CONVERSATIONS:
                self._params.popitem(last=False)


def conversation_of(body: Mapping[str, Any]) -> str | None:
    """What the client calls its conversation; raises `NotServed`."""
    name = body.get(CONVERSATION_ID)
    if name is None or (isinstance(name, str) and 0 < len(name) <= LONGEST_CONVERSATION_ID):
        return name
    raise NotServed(
        400, f"{CONVERSATION_ID} is not a string of 1 to {LONGEST_CONVERSATION_ID} characters"
    )
