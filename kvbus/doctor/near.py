"""Says how KV comes from a prefill agent of the same machine, which may be in another container."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from kvbus.agent.identity import mount_namespace
from kvbus.doctor.finding import OK, WARNING, Finding
from kvbus.doctor.sharing import OPEN
from kvbus.protocol.status import Sharing

NOTHING: Mapping[str, str] = MappingProxyType({})
WHY = (
    "Where the memory of the engine is not mapped UCX reads it. It does so through shared memory "
    "within one PID namespace only, and else over TCP, at a fraction of the speed."
)
FIX = (
    "Mount the prefill agent's runtime_dir into the decode agent's container, at the same path, "
    "with both agents of one user (docs/kubernetes.md, pods of one node); or give both one PID "
    "namespace."
)


def near_findings(
    endpoint: str, theirs: Sharing, ours: Sharing, *, met: Mapping[str, str] = NOTHING
) -> Iterator[Finding]:
    """How it is between that agent and a reader that is as ``ours``; nothing for another machine.

    ``met`` are those of its engines that the reader has met, and whether their memory is mapped.
    """
    if theirs.machine != ours.machine or not ours.machine:
        return
    closed = _why_not_mapped(theirs, ours, met)
    is_near = theirs.pid_namespace in ("", ours.pid_namespace)
    if not closed:
        found = "it is on the same machine, and its memory can be mapped"
    elif is_near:
        found = f"it is on the same machine, and is read through shared memory: {closed}"
    else:
        found = "it is on the same machine, in another PID namespace, so UCX reads it over TCP: "
        found += closed
    yield Finding(
        "peer.one_machine",
        OK if is_near or not closed else WARNING,
        found,
        {"endpoint": endpoint, "not_mapped": closed, "same_pid_namespace": is_near},
        why=WHY,
        fix=FIX,
    )


def _why_not_mapped(theirs: Sharing, ours: Sharing, met: Mapping[str, str]) -> str:
    """Empty when the reader maps it, or would."""
    if met:
        return next((reason for reason in met.values() if reason != OPEN), "")
    if closed := theirs.closed or ours.closed:
        return closed
    if theirs.uid != ours.uid:
        return f"it is of uid {theirs.uid}, and the reader of uid {ours.uid}"
    return _why_not_there(theirs, ours)


def _why_not_there(theirs: Sharing, ours: Sharing) -> str:
    """Only the reader's own mount namespace can be looked into, which is ours as a rule."""
    if ours.mount_namespace != mount_namespace():
        is_one = theirs.mount_namespace == ours.mount_namespace
        return "" if is_one else f"{theirs.path} may not be there for the reader"
    try:
        is_there = Path(theirs.path).is_socket()
    except OSError as error:
        return f"{theirs.path}: {error.strerror}"
    return "" if is_there else f"{theirs.path} is not here"
