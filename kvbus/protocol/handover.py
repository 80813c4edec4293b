"""Messages of the attach socket by which an agent hands over to its successor.

The successor connects as an engine does. Its connection stays open until the agent that it replaces
has ended: while it is, the successor has the place.
"""

from typing import Any, ClassVar

from kvbus.protocol.engine import AgentRole
from kvbus.protocol.envelope import Name
from kvbus.protocol.message import Empty, Endpoint, Id, Message, Request


class HandedOver(Message, frozen=True):
    """Reply to `HandOver`: who answers, and where its tickets still lead to.

    Two descriptors come with it: of the attach socket, and of its lock.
    """

    agent_boot: Id
    peer_endpoint: Endpoint


class HandOver(Request[HandedOver], frozen=True):
    """A successor, which has started, asks for the place of the agent.

    ``busy`` while that one waits itself for the end of the one before it; ``incompatible`` when an
    engine could not go over without a loss. Nothing has changed yet at the `ok`.
    """

    op: ClassVar[str] = "hand_over"

    agent_id: Id
    role: AgentRole
    agent_boot: Name


class TakenOver(Request[Empty], frozen=True):
    """The successor has called ``listen`` on the attach socket, and accepts after the reply.

    From the reply on the agent accepts nobody, unless this connection ends before it has.
    """

    op: ClassVar[str] = "taken_over"


HANDOVER_REQUESTS: tuple[type[Request[Any]], ...] = (HandOver, TakenOver)
