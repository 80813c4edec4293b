"""Engines of two ranks in processes of their own, and what the machine still has of them."""

import json
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import PIPE
from typing import Any

import anyio

from tests.agents import AgentProcess
from tests.forked import ForkedEngine

SAYS_WITHIN_S = 60.0


@dataclass
class Part:
    """One process of an engine."""

    process: ForkedEngine

    async def says(self) -> Any:
        """Its next line."""
        assert self.process.stdout is not None
        with anyio.fail_after(SAYS_WITHIN_S):
            line = await anyio.to_thread.run_sync(
                self.process.stdout.readline, abandon_on_cancel=True
            )
        return json.loads(line)

    def kill(self) -> None:
        """End it at once; idempotent."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


@dataclass
class EngineInProcesses:
    """An engine; ``parts`` are its processes, by what is in them."""

    agent: AgentProcess
    engine_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    parts: dict[str, Part] = field(default_factory=dict)

    async def start(self, *parts: tuple[str, str], ticket: Any = None) -> Any:
        """Start processes with some ranks and a role each; returns what the last one has made."""
        said: Any = None
        for ranks, role in parts:
            arguments = [str(self.agent.attach), self.engine_id, ranks, role, json.dumps(ticket)]
            command = [sys.executable, "-m", "tests.process.engine_part", *arguments]
            self.parts[role] = Part(ForkedEngine(command, stdout=PIPE))
            said = await self.parts[role].says()
        return said

    @property
    def num_mappings(self) -> int:
        """How often its memory is mapped anywhere on the machine."""
        found = 0
        for maps in Path("/proc").glob("[0-9]*/maps"):
            try:
                lines = maps.read_text().splitlines()
            except OSError:  # it ended meanwhile
                continue
            found += sum(f"kvbus-{self.engine_id}" in line for line in lines)
        return found


@contextmanager
def in_processes(*agents: AgentProcess) -> Iterator[list[EngineInProcesses]]:
    """An engine for each agent, not started yet; their processes end with the ``with``."""
    engines = [EngineInProcesses(agent) for agent in agents]
    try:
        yield engines
    finally:
        for part in (part for one in engines for part in one.parts.values()):
            part.kill()
