"""Says whether NIXL starts, which backends it has, and how fast it reads.

Refuses to import NIXL: what may crash takes its own process along. Refuses to call a loopback the
network: what is measured is this machine alone. What UCX wrote is read, and not relied on.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from kvbus.doctor.children import PROBE, Budget, run_alone, run_pair
from kvbus.doctor.finding import ERROR, NOTE, OK, WARNING, Finding
from kvbus.doctor.host import rdma_devices
from kvbus.doctor.process import NixlList
from kvbus.text import rate_text

NEEDED_BACKEND = "UCX"
_TELL = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "UCX_PROTO_INFO": "y",
}
_UCX_CHOICES = re.compile(r"please use one or more of: ([a-z0-9_, ]+)")
_UCX_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_READ_TABLE = "remote memory read by ucp_get"


class UcxChoice(StrEnum):
    """A choice of UCX transports that is tried."""

    CONFIGURED = "configured"
    SHARED_MEMORY = "shared_memory"
    TCP = "tcp"
    RDMA = "rdma"


class ReadFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement, between two processes; ``bytes_per_s`` is None when it failed.

    ``ucx_tls`` is what UCX was told, empty when it could choose; ``wire`` is what it chose.
    """

    way: UcxChoice
    ucx_tls: str
    bytes_per_s: float | None
    wire: str
    error: str


UCX_TLS = {UcxChoice.SHARED_MEMORY: "sm,tcp", UcxChoice.TCP: "tcp", UcxChoice.RDMA: "ib"}
"""Shared memory alone cannot report a dead peer, and NIXL refuses it: TCP is beside it."""

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


def check_nixl(budget: Budget, on_progress: Callable[[str], None]) -> Iterator[Finding]:
    """NIXL itself, its backends, and how fast it reads, unless it does not load."""
    env = {**_TELL, "UCX_LOG_LEVEL": "info"}
    ended = run_alone(PROBE, "nixl", "list", env=env, budget=budget)
    listed, error = ended.answer(NixlList, NixlList("", {}))
    yield installed_finding(error, listed, ucx_version_in(ended.log))
    if not error:
        yield backends_finding(listed.backends, ucx_transports_in(ended.log))
        yield from read_findings(list(measured_reads(budget, on_progress)))


def measured_reads(budget: Budget, on_progress: Callable[[str], None]) -> Iterator[ReadFacts]:
    """One measurement for each way; RDMA where there is a device."""
    configured = os.environ.get("UCX_TLS", "")
    for way in UcxChoice:
        if way is UcxChoice.RDMA and not rdma_devices():
            continue
        on_progress(f"a NIXL READ, {way.replace('_', ' ')}")
        tls = UCX_TLS.get(way, configured)
        env = {**_TELL, "UCX_TLS": tls} if tls else _TELL
        ended = run_pair(PROBE, "nixl", env=env, budget=budget)
        rate, error = ended.answer(float, 0.0)
        wire = wire_in(ended.log) if rate else ""
        yield ReadFacts(way=way, ucx_tls=tls, bytes_per_s=rate or None, wire=wire, error=error)


def wire_in(log: str) -> str:
    """What UCX reads large pieces over, such as ``cma/memory``; `UCX_PROTO_INFO=y` tells it."""
    wire, is_read = "", False
    for line in log.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 1:
            is_read = cells[0].startswith(_READ_TABLE)
        elif is_read and cells and cells[0].endswith("inf"):
            wire = cells[-1]
    return wire


def ucx_transports_in(log: str) -> tuple[str, ...]:
    """The transports that UCX offers when it is asked for one that it does not have."""
    found = _UCX_CHOICES.search(log)
    return tuple(name.strip() for name in found[1].split(",")) if found else ()


def ucx_version_in(log: str) -> str:
    """The version that UCX tells when it starts to tell everything."""
    found = _UCX_VERSION.search(log)
    return found[1] if found else ""


def installed_finding(error: str, listed: NixlList, ucx_version: str) -> Finding:
    """``error`` is empty when NIXL could be loaded and made an agent, one without a backend."""
    if not error and not listed.backends.get(NEEDED_BACKEND):
        error = f"it has no backend {NEEDED_BACKEND} that can be loaded"
    version = listed.nixl_version
    found = f"NIXL {version or '?'}, UCX {ucx_version or '?'}"
    return Finding(
        "nixl.installed",
        ERROR if error else OK,
        f"NIXL does not work: {error}" if error else found,
        {"error": error} if error else {"nixl_version": version, "ucx_version": ucx_version},
        why="kvbus moves all bytes with NIXL and its backend UCX.",
        fix="Install nixl as required, see versions.nixl; of several installations of UCX, "
        "LD_LIBRARY_PATH may have chosen another.",
        command="python -c 'import nixl'",
    )


def backends_finding(
    backends: Mapping[str, Sequence[str]], ucx_transports: Sequence[str]
) -> Finding:
    """``backends`` has the memory types of each plugin, none for one that cannot be loaded."""
    loaded = ", ".join(name for name, kinds in backends.items() if kinds)
    others = ", ".join(name for name, kinds in backends.items() if not kinds)
    missing = f"; not loaded: {others}" if others else ""
    found = f"{loaded}{missing}; kvbus uses {NEEDED_BACKEND}"
    values = {"backends": backends, "ucx_transports": ucx_transports}
    return Finding("nixl.backends", OK, found, values)


def read_findings(reads: Sequence[ReadFacts]) -> Iterator[Finding]:
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
    return Finding(
        f"nixl.read.{one.way}",
        severity,
        found,
        {key: getattr(one, key) for key in ("ucx_tls", "bytes_per_s", "wire", "error")},
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
    return Finding(
        "nixl.one_machine",
        severity,
        found,
        {"way": best.way, "wire": best.wire, "bytes_per_s": best.bytes_per_s},
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
    return Finding("nixl.two_machines", severity, found, values, why=why, fix=fix)
