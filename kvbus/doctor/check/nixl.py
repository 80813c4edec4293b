"""Says whether NIXL starts, which backends it has, and how fast it reads.

Refuses to call a loopback the network: what is measured is this machine alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.text import rate_text

NEEDED_BACKEND = "UCX"


class UcxChoice(StrEnum):
    """A choice of UCX transports that is tried."""

    CONFIGURED = "configured"
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    RDMA = "rdma"


class NixlFacts(msgspec.Struct, frozen=True, kw_only=True):
    """``error`` is empty when NIXL could be loaded and made an agent, one without a backend.

    ``backends`` has the memory types of each plugin, none for one that cannot be loaded.
    """

    error: str
    nixl_version: str
    ucx_version: str
    backends: Mapping[str, tuple[str, ...]]
    ucx_transports: tuple[str, ...]


class ReadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, between two processes; ``bytes_per_s`` is None when it failed.

    ``ucx_tls`` is what UCX was told, empty when it could choose; ``wire`` is what it chose.
    """

    way: UcxChoice
    ucx_tls: str
    bytes_per_s: float | None
    wire: str
    error: str


def check_nixl(facts: NixlFacts) -> Iterator[Finding]:
    """NIXL itself, and the backends."""
    error = facts.error
    if not error and not facts.backends.get(NEEDED_BACKEND):
        error = f"it has no backend {NEEDED_BACKEND} that can be loaded"
    if error:
        found = f"NIXL does not work: {error}"
        yield Finding("nixl.installed", ERROR, found, {"error": error}).advised(
            why="kvbus moves all bytes with NIXL and its backend UCX.",
            fix="Install nixl as required, see versions.nixl; of several installations of UCX, "
            "LD_LIBRARY_PATH may have chosen another.",
            command="python -c 'import nixl'",
        )
    else:
        found = f"NIXL {facts.nixl_version or '?'}, UCX {facts.ucx_version or '?'}"
        values = {"nixl_version": facts.nixl_version, "ucx_version": facts.ucx_version}
        yield Finding("nixl.installed", OK, found, values)
    if not facts.error:
        yield _backends(facts)


def _backends(facts: NixlFacts) -> Finding:
    loaded = ", ".join(name for name, kinds in facts.backends.items() if kinds)
    others = ", ".join(name for name, kinds in facts.backends.items() if not kinds)
    missing = f"; not loaded: {others}" if others else ""
    found = f"{loaded}{missing}; kvbus uses {NEEDED_BACKEND}"
    values = {"backends": dict(facts.backends), "ucx_transports": list(facts.ucx_transports)}
    return Finding("nixl.backends", OK, found, values)


def check_reads(reads: Sequence[ReadFacts]) -> Iterator[Finding]:
    """Each measurement, and what they mean for agents of one machine and of two."""
    yield from (_read(one) for one in reads)
    rates = {one.way: one.bytes_per_s for one in reads if one.bytes_per_s}
    if rates:
        yield _one_machine([one for one in reads if one.bytes_per_s])
        yield _two_machines(rates)


def _read(one: ReadFacts) -> Finding:
    told = f"UCX_TLS={one.ucx_tls}" if one.ucx_tls else "UCX_TLS is not set"
    name = f"nixl.read.{one.way}"
    values = msgspec.structs.asdict(one)
    del values["way"]
    if one.bytes_per_s is not None:
        wire = f" over {one.wire}" if one.wire else ""
        return Finding(name, OK, f"{rate_text(one.bytes_per_s)}{wire} ({told})", values)
    why, fix = ADVICE[one.way]
    is_fatal = one.way is UcxChoice.CONFIGURED
    severity = ERROR if is_fatal else WARNING
    return Finding(name, severity, f"fails ({told}): {one.error}", values).advised(
        why=why, fix=fix, command="env | grep ^UCX_" if is_fatal else ""
    )


def _one_machine(working: Sequence[ReadFacts]) -> Finding:
    best = max(working, key=lambda one: one.bytes_per_s or 0.0)
    values = {"way": best.way, "wire": best.wire, "bytes_per_s": best.bytes_per_s}
    over_tcp = [
        one
        for one in working
        if one.way is UcxChoice.CONFIGURED and "tcp/" in one.wire  # one rail of several, too
    ]
    if not over_tcp:
        over = best.wire or best.ucx_tls or "what UCX chooses"
        found = f"fastest on this machine: {over}, {rate_text(best.bytes_per_s or 0.0)}"
        return Finding("nixl.one_machine", OK, found, values)
    rate = rate_text(over_tcp[0].bytes_per_s or 0.0)
    found = f"agents of this machine read over TCP, {rate}"
    return Finding("nixl.one_machine", WARNING, found, values).advised(
        why="Shared memory would be several times as fast, with less work for the cores.",
        fix="Let UCX use shared memory (UCX_TLS unset, or with sm), and let processes read each "
        "other's memory: see processes.read_memory.",
        command="unset UCX_TLS" if over_tcp[0].ucx_tls else "",
    )


def _two_machines(rates: Mapping[UcxChoice, float]) -> Finding:
    name = "nixl.two_machines"
    values = {"has_rdma": UcxChoice.RDMA in rates, "has_tcp": UcxChoice.TCP in rates}
    if values["has_rdma"]:
        found = f"to other machines by RDMA; {rate_text(rates[UcxChoice.RDMA])} in a loopback"
        return Finding(name, OK, found, values)
    if values["has_tcp"]:
        rate = rate_text(rates[UcxChoice.TCP])
        found = f"to other machines by TCP only: {rate} in a loopback, with no network between"
        return Finding(name, NOTE, found, values).advised(why="No RDMA device works here.")
    found = "neither RDMA nor TCP works: other machines cannot be reached"
    return Finding(name, WARNING, found, values).advised(
        why="Prefill and decode can only be on this machine.",
        fix="Fix one of them: their findings have the reasons.",
    )


ADVICE = {
    UcxChoice.CONFIGURED: (
        "Agents that are started from here have these settings, and cannot read.",
        "Look at the UCX_ settings of the environment; without any UCX chooses. "
        "UCX_TLS=sm,self cannot work, as shared memory alone cannot report a dead peer: add tcp.",
    ),
    UcxChoice.SHARED_MEMORY: (
        "Agents of one machine are fastest over shared memory.",
        "See memory.shared_folder, memory.segment and processes.read_memory.",
    ),
    UcxChoice.TCP: (
        "TCP is the way to other machines where there is no RDMA.",
        "See that a network interface is up (lo for agents of one machine) and that "
        "UCX_NET_DEVICES names one that is there.",
    ),
    UcxChoice.RDMA: (
        "There are RDMA devices, and agents would not use them.",
        "See limits.locked_memory; check the port (ibv_devinfo), and that /dev/infiniband "
        "is in the container.",
    ),
}
"""For a read that failed: why that matters, and the fix."""
