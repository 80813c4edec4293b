"""Owns what is said about NIXL: does it start, which backends has it, how fast does it read.

Refuses to call a loopback the network: what is measured is this machine alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvbus.doctor.finding import Finding, Severity

NEEDED_BACKEND = "UCX"


class Way(StrEnum):
    """A choice of UCX transports that is tried."""

    CONFIGURED = "configured"
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    RDMA = "rdma"


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlFacts:
    """``error`` is empty when NIXL could be loaded and made an agent, one without a backend.

    ``backends`` has the memory types of each plugin, none for one that cannot be loaded.
    """

    error: str
    nixl_version: str
    ucx_version: str
    backends: Mapping[str, tuple[str, ...]]
    ucx_transports: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFacts:
    """One measurement, between two processes; ``bytes_per_s`` is None when it failed.

    ``ucx_tls`` is what UCX was told, empty when it could choose; ``wire`` is what it chose.
    """

    way: Way
    ucx_tls: str
    bytes_per_s: float | None
    wire: str
    error: str


def judge_nixl(facts: NixlFacts) -> Iterator[Finding]:
    """NIXL itself, and the backends."""
    has_needed = bool(facts.backends.get(NEEDED_BACKEND))
    if facts.error or not has_needed:
        reason = facts.error or f"it has no backend {NEEDED_BACKEND} that can be loaded"
        yield Finding(
            name="nixl.installed",
            severity=Severity.ERROR,
            found=f"NIXL does not work: {reason}",
            why="kvbus moves all bytes with NIXL and its backend UCX.",
            mend="Install nixl as required, see versions.nixl; of several installations of UCX, "
            "LD_LIBRARY_PATH may have chosen another.",
            command="python -c 'import nixl'",
            values={"error": reason},
        )
    else:
        yield Finding(
            name="nixl.installed",
            severity=Severity.OK,
            found=f"NIXL {facts.nixl_version or '?'}, UCX {facts.ucx_version or '?'}",
            values={"nixl_version": facts.nixl_version, "ucx_version": facts.ucx_version},
        )
    if not facts.error:
        yield _backends(facts)


def _backends(facts: NixlFacts) -> Finding:
    loaded = [name for name, kinds in facts.backends.items() if kinds]
    others = [name for name in facts.backends if name not in loaded]
    missing = f"; not loaded: {', '.join(others)}" if others else ""
    return Finding(
        name="nixl.backends",
        severity=Severity.OK,
        found=f"{', '.join(loaded)}{missing}; kvbus uses {NEEDED_BACKEND}",
        values={
            "backends": {name: list(kinds) for name, kinds in facts.backends.items()},
            "ucx_transports": list(facts.ucx_transports),
        },
    )


def judge_reads(reads: Sequence[ReadFacts]) -> Iterator[Finding]:
    """Each measurement, and what they mean for agents of one machine and of two."""
    yield from (_read(one) for one in reads)
    if any(one.bytes_per_s for one in reads):
        yield _one_machine(reads)
        yield _two_machines(reads)


def _read(one: ReadFacts) -> Finding:
    told = f"UCX_TLS={one.ucx_tls}" if one.ucx_tls else "UCX_TLS is not set"
    values = {
        "ucx_tls": one.ucx_tls,
        "wire": one.wire,
        "bytes_per_s": one.bytes_per_s,
        "error": one.error,
    }
    name = f"nixl.read.{one.way}"
    if one.bytes_per_s is not None:
        wire = f" over {one.wire}" if one.wire else ""
        found = f"{shown_rate(one.bytes_per_s)}{wire} ({told})"
        return Finding(name=name, severity=Severity.OK, found=found, values=values)
    is_fatal = one.way is Way.CONFIGURED
    return Finding(
        name=name,
        severity=Severity.ERROR if is_fatal else Severity.WARNING,
        found=f"fails ({told}): {one.error}",
        why="Agents that are started from here have these settings, and cannot read."
        if is_fatal
        else _WHY[one.way],
        mend=_MEND[one.way],
        command="env | grep ^UCX_" if is_fatal else "",
        values=values,
    )


def _one_machine(reads: Sequence[ReadFacts]) -> Finding:
    working = [one for one in reads if one.bytes_per_s]
    best = max(working, key=lambda one: one.bytes_per_s or 0.0)
    configured = next((one for one in working if one.way is Way.CONFIGURED), None)
    over = f"{best.wire or best.ucx_tls or 'what UCX chooses'}"
    found = f"fastest on this machine: {over}, {shown_rate(best.bytes_per_s or 0.0)}"
    values = {"way": best.way.value, "wire": best.wire, "bytes_per_s": best.bytes_per_s}
    if configured is None or "tcp/" not in configured.wire:  # one rail of several, too
        return Finding(name="nixl.one_machine", severity=Severity.OK, found=found, values=values)
    return Finding(
        name="nixl.one_machine",
        severity=Severity.WARNING,
        found=f"agents of this machine read over TCP, {shown_rate(configured.bytes_per_s or 0.0)}",
        why="Shared memory would be several times as fast, with less work for the cores.",
        mend="Let UCX use shared memory (UCX_TLS unset, or with sm), and processes read each "
        "other's memory: see processes.read_memory.",
        command="unset UCX_TLS" if configured.ucx_tls else "",
        values=values,
    )


def _two_machines(reads: Sequence[ReadFacts]) -> Finding:
    rates = {one.way: one.bytes_per_s for one in reads if one.bytes_per_s}
    values = {"has_rdma": Way.RDMA in rates, "has_tcp": Way.TCP in rates}
    name = "nixl.two_machines"
    if Way.RDMA in rates:
        found = f"to other machines by RDMA; {shown_rate(rates[Way.RDMA])} in a loopback"
        return Finding(name=name, severity=Severity.OK, found=found, values=values)
    if Way.TCP in rates:
        return Finding(
            name=name,
            severity=Severity.NOTE,
            found="to other machines by TCP only: "
            f"{shown_rate(rates[Way.TCP])} in a loopback, with no network between",
            why="No RDMA device works here.",
            values=values,
        )
    return Finding(
        name=name,
        severity=Severity.WARNING,
        found="neither RDMA nor TCP works: other machines cannot be reached",
        why="Prefill and decode can only be on this machine.",
        mend="Mend one of them: their findings have the reasons.",
        values=values,
    )


def shown_rate(bytes_per_s: float) -> str:
    """``9.31 GB/s``, ``850 MB/s``."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.3g} GB/s"
    return f"{bytes_per_s / 1e6:.3g} MB/s"


_WHY = {
    Way.SHARED_MEMORY: "Agents of one machine are fastest over shared memory.",
    Way.TCP: "TCP is the way to other machines where there is no RDMA.",
    Way.RDMA: "There are RDMA devices, and agents would not use them.",
}
_MEND = {
    Way.CONFIGURED: "Look at the UCX_ settings of the environment; without any UCX chooses. "
    "UCX_TLS=sm,self cannot work, as shared memory alone cannot report a dead peer: add tcp.",
    Way.SHARED_MEMORY: "See memory.shared_folder, memory.segment and processes.read_memory.",
    Way.TCP: "See that a network interface is up (lo for agents of one machine) and that "
    "UCX_NET_DEVICES names one that is there.",
    Way.RDMA: "See limits.locked_memory; check the port (ibv_devinfo), and that /dev/infiniband "
    "is in the container.",
}
