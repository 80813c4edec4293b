"""Owns what is said about processes that read each other's memory, as UCX does (CMA).

Refuses to guess from settings: they only explain what was tried.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.doctor.finding import Finding, Severity


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFacts:
    """``read_error`` is empty when one process could read another's memory.

    ``ptrace_scope`` is Yama's, None where the kernel has none; ``may_trace`` says that we have
    CAP_SYS_PTRACE.
    """

    read_error: str
    ptrace_scope: int | None
    may_trace: bool


def judge_processes(facts: ProcessFacts) -> Iterator[Finding]:
    """One finding."""
    values = {
        "error": facts.read_error,
        "ptrace_scope": facts.ptrace_scope,
        "may_trace": facts.may_trace,
    }
    if not facts.read_error:
        yield Finding(
            name="processes.read_memory",
            severity=Severity.OK,
            found="one process can read another's memory (CMA)",
            values=values,
        )
        return
    is_yama = (facts.ptrace_scope or 0) > 1
    yield Finding(
        name="processes.read_memory",
        severity=Severity.WARNING,
        found=f"one process cannot read another's memory (CMA): {facts.read_error}",
        why="UCX copies between processes of this machine that way; otherwise it goes over TCP.",
        mend=f"kernel.yama.ptrace_scope is {facts.ptrace_scope}: set it to 1 or 0."
        if is_yama
        else "Allow it in the sandbox: docker --cap-add SYS_PTRACE, or a seccomp profile with "
        "process_vm_readv; agents in different containers need one PID namespace.",
        command="sysctl kernel.yama.ptrace_scope=1" if is_yama else "",
        values=values,
    )
