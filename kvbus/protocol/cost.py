"""What a handoff would cost: asked by routers of decode agents, before they choose."""

from typing import Annotated, ClassVar

import msgspec

from kvbus.protocol.message import Endpoint, Id, Message, Request, Size, Text, Tokens

AnySeconds = Annotated[float, msgspec.Meta(ge=0)]


class Predicted(Message, frozen=True):
    """Reply to `Cost`: ``predicted_s`` from the request of a fetch to its end.

    ``queue_s`` of that is due to fetches that are under way, and to reads by other agents from that
    prefill agent, which its heartbeats tell. ``path`` is empty, and the rest a
    guess, for engines that have not met. ``num_observed`` handoffs correct the prediction, the last
    of which ended ``observed_s_ago``.
    """

    predicted_s: AnySeconds
    queue_s: AnySeconds
    num_bytes: Size
    decode_engine: Id
    path: Text = ""
    num_observed: Size = 0
    observed_s_ago: AnySeconds | None = None


class Cost(Request[Predicted], frozen=True):
    """Asks a decode agent what a fetch would take now; it changes nothing.

    ``endpoint`` is the prefill agent's, as in its tickets. Engines need a name where the agents
    have several. The first ``first_token`` tokens are in the decode engine's cache already.
    """

    op: ClassVar[str] = "cost"

    endpoint: Endpoint
    num_tokens: Tokens
    first_token: Tokens = 0
    prefill_engine: Text = ""
    decode_engine: Text = ""


class CostEvent(Message, frozen=True):
    """Event ``cost.changed``: a handoff takes ``fixed_s``, and its bytes at ``bytes_per_s``."""

    endpoint: Endpoint
    prefill_engine: Id
    decode_engine: Id
    token_bytes: Size
    fixed_s: AnySeconds
    bytes_per_s: AnySeconds
