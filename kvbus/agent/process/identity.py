"""Who an agent is, and where it can be reached.

Refuses to change: a process that comes back has another boot id and is another agent.
"""

from dataclasses import dataclass

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol.attach import FEATURES, Hello, Welcome
from kvbus.protocol.engine import AgentRole
from kvbus.protocol.envelope import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class AgentIdentity:
    """The name, the boot id, and the endpoints as others reach them."""

    agent_id: str
    boot: str
    role: AgentRole
    engine_endpoint: str
    peer_endpoint: str
    events_endpoint: str
    server_key: str = ""

    def welcome(self, hello: Hello) -> Welcome:
        """The answer to an engine's hello; raises `LocalError` (``unsupported_version``)."""
        check_protocol(hello.min_protocol, hello.max_protocol)
        return Welcome(
            protocol=PROTOCOL_VERSION,
            agent_id=self.agent_id,
            agent_boot=self.boot,
            role=self.role,
            engine_endpoint=self.engine_endpoint,
            peer_endpoint=self.peer_endpoint,
            events_endpoint=self.events_endpoint,
            features=FEATURES,
            server_key=self.server_key,
        )


def check_protocol(theirs_min: int, theirs_max: int) -> None:
    """Raise `LocalError` unless the other side's range has the version that this side speaks."""
    if not theirs_min <= PROTOCOL_VERSION <= theirs_max:
        raise LocalError(
            f"the other side speaks protocol {theirs_min} to {theirs_max}, "
            f"this agent speaks {PROTOCOL_VERSION}",
            code=ErrorCode.UNSUPPORTED_VERSION,
            theirs=f"{theirs_min}..{theirs_max}",
            ours=PROTOCOL_VERSION,
        )
