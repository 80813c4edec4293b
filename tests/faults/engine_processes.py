"""Engines in processes of their own, to be killed, and what the machine still has of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import kvbus
from tests.agents import AgentProcess

SCRIPTS = Path(__file__).parent / "processes"


class EngineProcess:
    """An engine in a process of its own, or one of its processes."""

    def __init__(
        self, agent: AgentProcess, engine_id: str, *arguments: str, script: str = "engine.py"
    ) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / script), str(agent.attach), engine_id, *arguments],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(kvbus.__file__).parents[1])},
        )

    def said(self) -> dict[str, Any]:
        """Its next line."""
        assert self.process.stdout is not None
        line: dict[str, Any] = json.loads(self.process.stdout.readline())
        return line

    def kill(self) -> None:
        """End it at once; idempotent."""
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """End it, and close what connects to it."""
        self.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()


def num_mappings_of(engine_id: str) -> int:
    """How often the memory of an engine is mapped anywhere on the machine."""
    found = 0
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            found += sum(f"kvbus-{engine_id}" in line for line in maps.read_text().splitlines())
        except OSError:  # it ended meanwhile
            continue
    return found
