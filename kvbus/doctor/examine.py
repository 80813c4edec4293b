"""Runs the families of checks in turn: collects the facts of each, and has them judged.

Refuses to let a family that cannot be checked end the others: that is a finding of its own.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvbus.doctor.finding import Finding, Severity
from kvbus.doctor.judge.agents import judge_agents
from kvbus.doctor.judge.cuda import judge_cuda
from kvbus.doctor.judge.limits import judge_limits
from kvbus.doctor.judge.memory import judge_memory
from kvbus.doctor.judge.nixl import judge_nixl, judge_reads
from kvbus.doctor.judge.processes import judge_processes
from kvbus.doctor.judge.versions import judge_versions
from kvbus.doctor.probe.agents import Sourced, agent_facts
from kvbus.doctor.probe.children import Budget
from kvbus.doctor.probe.cuda import cuda_facts
from kvbus.doctor.probe.limits import limit_facts, rdma_devices
from kvbus.doctor.probe.memory import memory_facts
from kvbus.doctor.probe.nixl import nixl_facts, read_facts
from kvbus.doctor.probe.processes import process_facts
from kvbus.doctor.probe.versions import version_facts
from kvbus.errors import KVBusError
from kvbus.memory.room import available_bytes


class Family(StrEnum):
    """Checks that belong together, in the order in which they run."""

    VERSIONS = "versions"
    MEMORY = "memory"
    LIMITS = "limits"
    PROCESSES = "processes"
    NIXL = "nixl"
    CUDA = "cuda"
    AGENTS = "agents"


@dataclass(frozen=True, slots=True)
class Examination:
    """What to look at: these agents, within this budget; ``say`` is told what is being done."""

    agents: list[Sourced]
    budget: Budget
    say: Callable[[str], None]

    def findings(self, families: Iterable[Family]) -> list[Finding]:
        """The findings of these families, in the order of `Family`."""
        wanted = set(families)
        return [one for family in Family if family in wanted for one in self._family(family)]

    def _family(self, family: Family) -> list[Finding]:
        self.say(family.value)
        try:
            return list(self._judged(family))
        except (OSError, ValueError, KeyError, KVBusError) as error:
            return [_unchecked(family, error)]

    def _judged(self, family: Family) -> Iterable[Finding]:
        checks: dict[Family, Callable[[], Iterable[Finding]]] = {
            Family.VERSIONS: lambda: judge_versions(version_facts()),
            Family.MEMORY: lambda: judge_memory(memory_facts()),
            Family.LIMITS: lambda: judge_limits(limit_facts()),
            Family.PROCESSES: lambda: judge_processes(process_facts(self.budget)),
            Family.NIXL: self._nixl,
            Family.CUDA: lambda: judge_cuda(cuda_facts(self.budget)),
            Family.AGENTS: self._agents,
        }
        return checks[family]()

    def _nixl(self) -> Iterator[Finding]:
        facts = nixl_facts(self.budget)
        yield from judge_nixl(facts)
        if facts.error:
            return  # no transport can do without
        reads = read_facts(
            os.environ.get("UCX_TLS", ""),
            has_rdma=bool(rdma_devices()),
            budget=self.budget,
            say=self.say,
        )
        yield from judge_reads(list(reads))

    def _agents(self) -> Iterator[Finding]:
        facts = [agent_facts(source, config) for source, config in self.agents]
        yield from judge_agents(facts, available_bytes=available_bytes())


def _unchecked(family: Family, error: Exception) -> Finding:
    return Finding(
        name=f"{family}.unchecked",
        severity=Severity.WARNING,
        found=f"this could not be checked: {error}",
        why="It may be all right, and it may not.",
        mend="Mend what the message says, and run kvbus doctor again.",
        values={"error": str(error)},
    )
