"""Says whether agents can have what they want: their ports, folders and staging."""

from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from kvbus.doctor.finding import ERROR, NOTE, OK, Finding, finding, picked
from kvbus.text import bytes_text


class Bind(msgspec.Struct, frozen=True, kw_only=True):
    """One address of an agent.

    ``error`` is empty when it can be bound; ``held_by`` is the id of the agent that answers there.
    """

    key: str
    address: str
    error: str
    held_by: str = ""

    @property
    def host_and_port(self) -> str:
        """The same for each way to write an address."""
        return self.address.removeprefix("tcp://")

    @property
    def port(self) -> str:
        """ "0" lets the system choose one."""
        return self.address.rpartition(":")[2]


class AgentFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What one agent wants; ``source`` is its file, or whose defaults these are.

    ``folder_error`` is empty when the runtime folder is there or can be made, with mode 0700, and
    the path of the socket in it is short enough.
    """

    source: str
    agent_id: str
    binds: tuple[Bind, ...]
    folder: str
    folder_error: str
    staging_bytes: int

    @property
    def is_running(self) -> bool:
        """Whether this very agent answers at one of its addresses."""
        return any(bind.held_by == self.agent_id for bind in self.binds)


def check_agents(agents: Sequence[AgentFacts], *, available_bytes: int) -> Iterator[Finding]:
    """Each agent's ports and folder, then what they want together."""
    for agent in agents:
        yield from _ports(agent)
        yield finding(
            f"agents.{agent.agent_id}.runtime_dir",
            ERROR if agent.folder_error else OK,
            agent.folder_error or agent.folder,
            {"folder": agent.folder, "error": agent.folder_error},
            why=f"Engines meet their agent in this folder ({agent.source}).",
            fix="Set runtime_dir to a folder of this user, with mode 0700 and a short path.",
        )
    yield from _clashes(agents)
    wanted_bytes = sum(agent.staging_bytes for agent in agents if not agent.is_running)
    yield finding(
        "agents.staging",
        OK if wanted_bytes <= available_bytes else ERROR,
        f"{bytes_text(wanted_bytes)} wanted, {bytes_text(available_bytes)} available",
        {"wanted_bytes": wanted_bytes, "available_bytes": available_bytes},
        why="An agent reserves its staging when it starts, and does not start without it.",
        fix="Make staging_bytes smaller, or free memory.",
    )


def _ports(agent: AgentFacts) -> Iterator[Finding]:
    name = f"agents.{agent.agent_id}"
    values = {bind.key: bind.address for bind in agent.binds}
    if agent.is_running:
        yield finding(f"{name}.ports", NOTE, "the agent runs already, and has its ports", values)
        return
    taken = [bind for bind in agent.binds if bind.error]
    for bind in taken:
        by = f", by the agent '{bind.held_by}'" if bind.held_by else ""
        yield finding(
            f"{name}.{bind.key}",
            ERROR,
            f"{bind.address} cannot be bound{by}: {bind.error}",
            picked(bind, "address", "error", "held_by"),
            why=f"The agent does not start without it ({agent.source}).",
            fix="End what holds it, or choose another address.",
            command=f"ss -ltnp 'sport = :{bind.port}'",
        )
    if not taken:
        free = ", ".join(bind.host_and_port for bind in agent.binds)
        yield finding(f"{name}.ports", OK, f"free: {free}", values)


def _clashes(agents: Sequence[AgentFacts]) -> Iterator[Finding]:
    binds = [bind for agent in agents for bind in agent.binds if bind.port != "0"]
    wanted = Counter(bind.host_and_port for bind in binds)
    wanted += Counter(one for agent in agents for one in (agent.agent_id, agent.folder))
    twice = [one for one, count in wanted.items() if count > 1]
    if twice:
        yield finding(
            "agents.clash",
            ERROR,
            f"wanted more than once: {', '.join(twice)}",
            {"wanted_twice": twice},
            why="Each address, agent_id and runtime_dir can be had once.",
            fix="Choose another in one of the files.",
        )
