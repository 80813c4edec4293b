"""Reads what NIXL, UCX and Python wrote while they were tried.

Refuses to rely on it: what is not found is empty, as these words are not a contract.
"""

import re

_UCX_ERROR = re.compile(r"UCX\s+ERROR\s+(.+)")
_UCX_CHOICES = re.compile(r"please use one or more of: ([a-z0-9_, ]+)")
_UCX_VERSION = re.compile(r"UCX\s+INFO\s+Version (\S+)")
_NIXL_ERROR = re.compile(r"^E\d{4} \S+\s+\d+ \S+?:\d+\] (.+)", re.MULTILINE)
_READ_TABLE = "remote memory read by ucp_get"
MAX_REASON_LETTERS = 300


def reason_in(log: str) -> str:
    """The first error that UCX told, or else NIXL, or else the last line, which is Python's."""
    for pattern in (_UCX_ERROR, _NIXL_ERROR):
        if found := pattern.search(log):
            return found[1].strip()[:MAX_REASON_LETTERS]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    return lines[-1][:MAX_REASON_LETTERS] if lines else ""


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
