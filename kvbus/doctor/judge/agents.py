"""Owns what is said about the places that agents want: their ports, folders and staging.

Refuses to know what an agent does there.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbus.doctor.finding import Finding, Severity
from kvbus.text import bytes_text


@dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """One address of an agent.

    ``error`` is empty when it can be bound; ``held_by`` is the id of the agent that answers there.
    """

    key: str
    address: str
    error: str
    held_by: str = ""

    @property
    def place(self) -> str:
        """Host and port, the same for each way to write an address."""
        return self.address.removeprefix("tcp://")

    @property
    def takes_any_port(self) -> bool:
        """Whether the system chooses the port."""
        return self.address.rpartition(":")[2] == "0"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFacts:
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


def judge_agents(agents: Sequence[AgentFacts], *, available_bytes: int) -> Iterator[Finding]:
    """Each agent's ports and folder, then what they want together."""
    for agent in agents:
        yield from _ports(agent)
        yield _folder(agent)
    yield from _clashes(agents)
    yield _staging(agents, available_bytes)


def _ports(agent: AgentFacts) -> Iterator[Finding]:
    values = {bind.key: bind.address for bind in agent.binds}
    name = f"agents.{agent.agent_id}.ports"
    if agent.is_running:
        yield Finding(
            name=name,
            severity=Severity.NOTE,
            found="the agent runs already, and has its ports",
            values=values,
        )
        return
    taken = [bind for bind in agent.binds if bind.error]
    for bind in taken:
        by = f", by the agent '{bind.held_by}'" if bind.held_by else ""
        port = bind.address.rpartition(":")[2]
        yield Finding(
            name=f"agents.{agent.agent_id}.{bind.key}",
            severity=Severity.ERROR,
            found=f"{bind.address} cannot be bound{by}: {bind.error}",
            why=f"The agent does not start without it ({agent.source}).",
            mend="End what holds it, or choose another address.",
            command=f"ss -ltnp 'sport = :{port}'",
            values={"address": bind.address, "error": bind.error, "held_by": bind.held_by},
        )
    if not taken:
        shown = ", ".join(bind.place for bind in agent.binds)
        yield Finding(name=name, severity=Severity.OK, found=f"free: {shown}", values=values)


def _folder(agent: AgentFacts) -> Finding:
    name = f"agents.{agent.agent_id}.runtime_dir"
    values = {"folder": agent.folder, "error": agent.folder_error}
    if not agent.folder_error:
        return Finding(name=name, severity=Severity.OK, found=agent.folder, values=values)
    return Finding(
        name=name,
        severity=Severity.ERROR,
        found=agent.folder_error,
        why=f"Engines meet their agent in this folder ({agent.source}).",
        mend="Set runtime_dir to a folder of ours, with mode 0700 and a short path.",
        values=values,
    )


def _clashes(agents: Sequence[AgentFacts]) -> Iterator[Finding]:
    places = Counter(
        bind.place for agent in agents for bind in agent.binds if not bind.takes_any_port
    )
    own = Counter(one for agent in agents for one in (agent.agent_id, agent.folder))
    twice = [wanted for wanted, count in (places + own).items() if count > 1]
    if twice:
        yield Finding(
            name="agents.clash",
            severity=Severity.ERROR,
            found=f"wanted more than once: {', '.join(twice)}",
            why="Each address, agent_id and runtime_dir can be had once.",
            mend="Choose another in one of the files.",
            values={"wanted_twice": twice},
        )


def _staging(agents: Sequence[AgentFacts], available_bytes: int) -> Finding:
    waiting = [agent for agent in agents if not agent.is_running]
    wanted_bytes = sum(agent.staging_bytes for agent in waiting)
    fits = wanted_bytes <= available_bytes
    return Finding(
        name="agents.staging",
        severity=Severity.OK if fits else Severity.ERROR,
        found=f"{bytes_text(wanted_bytes)} wanted, {bytes_text(available_bytes)} available",
        why="" if fits else "Staging is reserved when an agent starts, and it does not start.",
        mend="" if fits else "Make staging_bytes smaller, or free memory.",
        values={"wanted_bytes": wanted_bytes, "available_bytes": available_bytes},
    )
