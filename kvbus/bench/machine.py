"""The machine of a measurement."""

import os
import platform
import textwrap
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("kvbus", "nixl", "pyzmq")
WIDTH = 79


def facts() -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_before": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def head(facts: Mapping[str, Any]) -> str:
    """Return the facts as a sentence, in lines of at most 80 columns."""
    gpus = [
        *facts.get("gpus", ()),
        *(f"driver {facts[one]}" for one in ("driver",) if one in facts),
    ]
    parts = [
        f"{facts['cpu']}, {facts['cpus']} CPUs, {facts['memory_bytes'] / (1 << 30):.0f} GiB",
        *gpus,
        f"load {facts['load_before']:g}",
        f"Linux {facts['kernel']}",
        f"Python {facts['python']}",
        *(f"{package} {facts[package]}" for package in PACKAGES),
    ]
    return textwrap.fill(", ".join(parts), WIDTH)


def _cpu_model() -> str:
    """Arm kernels do not name the model there."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
