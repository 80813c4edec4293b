"""Says whether NIXL starts, which backends it has, and how fast it reads.

Refuses to call a loopback the network: what is measured is this machine alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding, finding, picked
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


def check_nixl(facts: NixlFacts) -> Iterator[Finding]:
    """NIXL itself, and the backends."""
    error = facts.error
    if not error and not facts.backends.get(NEEDED_BACKEND):
        error = f"it has no backend {NEEDED_BACKEND} that can be loaded"
    found = f"NIXL {facts.nixl_version or '?'}, UCX {facts.ucx_version or '?'}"
    yield finding(
        "nixl.installed",
        ERROR if error else OK,
        f"NIXL does not work: {error}" if error else found,
        {"error": error} if error else picked(facts, "nixl_version", "ucx_version"),
        why="kvbus moves all bytes with NIXL and its backend UCX.",
        fix="Install nixl as required, see versions.nixl; of several installations of UCX, "
        "LD_LIBRARY_PATH may have chosen another.",
        command="python -c 'import nixl'",
    )
    if not facts.error:
        loaded = ", ".join(name for name, kinds in facts.backends.items() if kinds)
        others = ", ".join(name for name, kinds in facts.backends.items() if not kinds)
        missing = f"; not loaded: {others}" if others else ""
        found = f"{loaded}{missing}; kvbus uses {NEEDED_BACKEND}"
        yield finding("nixl.backends", OK, found, picked(facts, "backends", "ucx_transports"))


def check_reads(reads: Sequence[ReadFacts]) -> Iterator[Finding]:
    """Each measurement, and what they mean for agents of one machine and of two."""
    yield from (_read(one) for one in reads)
    rates = {one.way: one.bytes_per_s for one in reads if one.bytes_per_s}
    if rates:
        yield _one_machine([one for one in reads if one.bytes_per_s])
        yield _two_machines(rates)


def _read(one: ReadFacts) -> Finding:
    told = f"UCX_TLS={one.ucx_tls}" if one.ucx_tls else "UCX_TLS is not set"
    severity, found, (why, fix) = OK, f"fails ({told}): {one.error}", ADVICE[one.way]
    is_fatal = one.way is UcxChoice.CONFIGURED
    if one.bytes_per_s is None:
        severity = ERROR if is_fatal else WARNING
    else:
        wire = f" over {one.wire}" if one.wire else ""
        found = f"{rate_text(one.bytes_per_s)}{wire} ({told})"
    return finding(
        f"nixl.read.{one.way}",
        severity,
        found,
        picked(one, "ucx_tls", "bytes_per_s", "wire", "error"),
        why=why,
        fix=fix,
        command="env | grep ^UCX_" if is_fatal else "",
    )


def _one_machine(working: Sequence[ReadFacts]) -> Finding:
    best = max(working, key=lambda one: one.bytes_per_s or 0.0)
    over = best.wire or best.ucx_tls or "what UCX chooses"
    severity, found = OK, f"fastest on this machine: {over}, {rate_text(best.bytes_per_s or 0.0)}"
    configured = next((one for one in working if one.way is UcxChoice.CONFIGURED), best)
    if configured.way is UcxChoice.CONFIGURED and "tcp/" in configured.wire:  # one of several, too
        rate = rate_text(configured.bytes_per_s or 0.0)
        severity, found = WARNING, f"agents of this machine read over TCP, {rate}"
    return finding(
        "nixl.one_machine",
        severity,
        found,
        picked(best, "way", "wire", "bytes_per_s"),
        why="Shared memory would be several times as fast, with less work for the cores.",
        fix="Let UCX use shared memory (UCX_TLS unset, or with sm), and let processes read each "
        "other's memory: see processes.read_memory.",
        command="unset UCX_TLS" if configured.ucx_tls else "",
    )


def _two_machines(rates: Mapping[UcxChoice, float]) -> Finding:
    rdma, tcp = rates.get(UcxChoice.RDMA), rates.get(UcxChoice.TCP)
    severity, found = WARNING, "neither RDMA nor TCP works: other machines cannot be reached"
    why = "Prefill and decode can only be on this machine."
    fix = "Fix one of them: their findings have the reasons."
    if rdma:
        severity, found = OK, f"to other machines by RDMA; {rate_text(rdma)} in a loopback"
    elif tcp:
        rate = rate_text(tcp)
        found = f"to other machines by TCP only: {rate} in a loopback, with no network between"
        severity, why, fix = NOTE, "No RDMA device works here.", ""
    values = {"has_rdma": bool(rdma), "has_tcp": bool(tcp)}
    return finding("nixl.two_machines", severity, found, values, why=why, fix=fix)
