"""Has NIXL tried in processes of its own: what it has, and what it reads over each transport.

Refuses to import it here: a transport that crashes takes its process along, and no more.
"""

from collections.abc import Callable, Iterator

import msgspec

from kvbus.doctor.check.logs import ucx_transports_in, ucx_version_in, wire_in
from kvbus.doctor.check.nixl import NixlFacts, ReadFacts, UcxChoice
from kvbus.doctor.probe.children import Budget, Ended, run_alone, run_pair

LIST_MODULE = "kvbus.doctor.probe.nixl_list_process"
READ_MODULE = "kvbus.doctor.probe.nixl_read_process"

UCX_TLS = {UcxChoice.SHARED_MEMORY: "sm,tcp", UcxChoice.TCP: "tcp", UcxChoice.RDMA: "ib"}
"""Shared memory alone cannot report a dead peer, and NIXL refuses it: TCP is beside it."""

_TELL = {
    "NIXL_LOG_LEVEL": "ERROR",
    "UCX_LOG_LEVEL": "error",
    "UCX_LOG_FILE": "stderr",
    "UCX_PROTO_INFO": "y",
}


class Listed(msgspec.Struct, frozen=True):
    """What the listing process prints."""

    nixl_version: str
    backends: dict[str, tuple[str, ...]]


class Measured(msgspec.Struct, frozen=True):
    """What the reading process prints: the median."""

    bytes_per_s: float


def nixl_facts(budget: Budget) -> NixlFacts:
    """Versions and backends, or why there is none."""
    ended = run_alone(LIST_MODULE, env={**_TELL, "UCX_LOG_LEVEL": "info"}, budget=budget)
    listed, error = Listed("", {}), ended.failure
    if not error:
        try:
            listed = msgspec.json.decode(ended.output, type=Listed)
        except msgspec.DecodeError:
            error = "it answered something else"
    return NixlFacts(
        error=error,
        nixl_version=listed.nixl_version,
        ucx_version=ucx_version_in(ended.log),
        backends=listed.backends,
        ucx_transports=ucx_transports_in(ended.log),
    )


def read_facts(
    configured: str, *, has_rdma: bool, budget: Budget, on_progress: Callable[[str], None]
) -> Iterator[ReadFacts]:
    """One measurement for each way; ``configured`` is the environment's UCX_TLS, often empty."""
    ways = [
        UcxChoice.CONFIGURED,
        UcxChoice.SHARED_MEMORY,
        UcxChoice.TCP,
        *([UcxChoice.RDMA] if has_rdma else []),
    ]
    for way in ways:
        on_progress(f"a NIXL READ, {way.replace('_', ' ')}")
        tls = configured if way is UcxChoice.CONFIGURED else UCX_TLS[way]
        env = {**_TELL, "UCX_TLS": tls} if tls else _TELL
        yield _facts(way, tls, run_pair(READ_MODULE, env=env, budget=budget))


def _facts(way: UcxChoice, tls: str, ended: Ended) -> ReadFacts:
    rate, error = None, ended.failure
    if not error:
        try:
            rate = msgspec.json.decode(ended.output, type=Measured).bytes_per_s
        except msgspec.DecodeError:
            error = "the reader answered something else"
    return ReadFacts(
        way=way, ucx_tls=tls, bytes_per_s=rate, wire=wire_in(ended.log) if rate else "", error=error
    )
