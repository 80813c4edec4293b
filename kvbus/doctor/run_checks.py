"""Runs the families of checks in turn: collects the facts of each, and makes findings of them.

A family that cannot be checked does not end the others: that is a finding of its own.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum

from kvbus.doctor.check.agents import check_agents
from kvbus.doctor.check.cuda import check_cuda
from kvbus.doctor.check.host import check_limits, check_memory, check_processes
from kvbus.doctor.check.nixl import check_nixl, check_reads
from kvbus.doctor.check.versions import check_versions
from kvbus.doctor.finding import Finding, Severity
from kvbus.doctor.probe.agents import AgentSource, agent_facts
from kvbus.doctor.probe.children import Budget
from kvbus.doctor.probe.host import limit_facts, memory_facts, version_facts
from kvbus.doctor.probe.trials import cuda_facts, nixl_facts, process_facts, read_facts
from kvbus.errors import KVBusError
from kvbus.memory.room import available_bytes

OnProgress = Callable[[str], None]


class Family(StrEnum):
    """Checks that belong together, in the order in which they run."""

    VERSIONS = "versions"
    MEMORY = "memory"
    LIMITS = "limits"
    PROCESSES = "processes"
    NIXL = "nixl"
    CUDA = "cuda"
    AGENTS = "agents"


def run_checks(
    families: Iterable[Family], agents: list[AgentSource], budget: Budget, on_progress: OnProgress
) -> list[Finding]:
    """The findings of these families, in the order of `Family`."""
    checks: Mapping[Family, Callable[[], Iterable[Finding]]] = {
        Family.VERSIONS: lambda: check_versions(version_facts()),
        Family.MEMORY: lambda: check_memory(memory_facts()),
        Family.LIMITS: lambda: check_limits(limit_facts()),
        Family.PROCESSES: lambda: check_processes(process_facts(budget)),
        Family.NIXL: lambda: _check_nixl(budget, on_progress),
        Family.CUDA: lambda: check_cuda(cuda_facts(budget)),
        Family.AGENTS: lambda: check_agents(
            [agent_facts(*agent) for agent in agents], available_bytes=available_bytes()
        ),
    }
    findings: list[Finding] = []
    for family in sorted(set(families), key=list(Family).index):
        on_progress(family.value)
        try:
            findings += checks[family]()
        except (OSError, ValueError, KeyError, KVBusError) as error:
            findings.append(_unchecked(family, error))
    return findings


def _check_nixl(budget: Budget, on_progress: OnProgress) -> Iterator[Finding]:
    facts = nixl_facts(budget)
    yield from check_nixl(facts)
    if not facts.error:  # else no transport works either
        yield from check_reads(list(read_facts(budget, on_progress)))


def _unchecked(family: Family, error: Exception) -> Finding:
    return Finding(
        f"{family}.unchecked",
        Severity.WARNING,
        f"this could not be checked: {error}",
        {"error": str(error)},
        why="It is not known whether this works.",
        fix="Fix what the message says, and run kvbus doctor again.",
    )
