"""Tries whether one process can read the memory of another one that it did not start.

Refuses to conclude from settings.
"""

from pathlib import Path

from kvbus.doctor.judge.processes import ProcessFacts
from kvbus.doctor.probe.children import Budget, run_pair
from kvbus.doctor.probe.limits import may_trace

MODULE = "kvbus.doctor.probe.read_memory_process"
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


def process_facts(budget: Budget) -> ProcessFacts:
    """Two processes, and the settings that explain what came of it."""
    return ProcessFacts(
        read_error=run_pair(MODULE, env={}, budget=budget).failure,
        ptrace_scope=_ptrace_scope(),
        may_trace=may_trace(),
    )


def _ptrace_scope() -> int | None:
    try:
        return int(_PTRACE_SCOPE.read_text(encoding="ascii"))
    except OSError:
        return None
