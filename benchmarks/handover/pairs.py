"""A prefill and a decode server with one connector between them, or with none.

Refuses to measure. What the variants are is the table `CONNECTORS`.
"""

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbus.bench.pairs import DEFAULTS, BenchAgent, agent
from kvbus.lab.process import Settings

from .own_part import STAMPS
from .servers import Recipe, Server, starting, wait_ready

PREFILL_CORE, DECODE_CORE = 0, 1

CONNECTORS = {
    "none": "no connector: the decode server has the prompt in its own prefix cache",
    "nixl": "vLLM's NixlConnector with its defaults",
    "nixl-tuned": "the same, with one NIXL thread an engine, which may run on any core",
    "kvbus": "kvbus.integrations.vllm.KvbusConnector, and two agents that run when they can",
    "kvbus-equal": "the same, but the agents share the cores with workers that spin",
}
TUNED = {"num_threads": 0}
"""Beside the thread that drives NIXL's progress: four of them, the default, spin as well."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two servers that are ready, and the agents beside them."""

    connector: str
    prefill: Server
    decode: Server
    agents: tuple[BenchAgent, ...] = ()

    @property
    def moves(self) -> bool:
        """Whether KV is handed over; if not, the decode server has it already."""
        return self.connector != "none"

    @property
    def works_stopped(self) -> bool:
        """Whether KV can be handed over while the prefill server does not run."""
        return self.connector.startswith("kvbus")

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds so far of the two servers and of the agents."""
        return {
            "prefill server": self.prefill.group.cpu_s(),
            "decode server": self.decode.group.cpu_s(),
            "agents": sum(agent.child.cpu_s() for agent in self.agents),
        }


@contextlib.contextmanager
def pair(
    connector: str, recipe: Recipe, *, nixl_extra: dict[str, Any], settings: Settings = DEFAULTS
) -> Iterator[Pair]:
    """Start all that ``connector`` needs, and end it; ``settings`` are those of the agents."""
    with contextlib.ExitStack() as stack:
        configs: tuple[str | None, str | None] = (None, None)
        agents: tuple[BenchAgent, ...] = ()
        if connector.startswith("kvbus"):
            agents = tuple(
                stack.enter_context(agent(role, recipe.folder, settings=settings))
                for role in ("prefill", "decode")
            )
            try:
                for started in agents if connector == "kvbus" else ():
                    os.sched_setscheduler(started.child.pid, os.SCHED_RR, os.sched_param(1))
            except PermissionError:
                raise SystemExit(
                    "error: only root, or who has CAP_SYS_NICE, can let the agents run first; "
                    "measure --connector kvbus-equal instead"
                ) from None
            module = "handover.stamped" if STAMPS in recipe.env else "kvbus.integrations.vllm"
            configs = _kvbus(agents[0].attach_path, module), _kvbus(agents[1].attach_path, module)
        elif connector != "none":
            extra = TUNED | nixl_extra if connector == "nixl-tuned" else nixl_extra
            configs = (_nixl(extra), _nixl(extra))
        prefill, decode = (
            stack.enter_context(
                starting(recipe, f"{connector}-{side}", core=core, kv_transfer_config=config)
            )
            for side, core, config in (
                ("prefill", PREFILL_CORE, configs[0]),
                ("decode", DECODE_CORE, configs[1]),
            )
        )
        for server in (prefill, decode):
            wait_ready(server.group, server.client())
            if connector == "nixl-tuned":
                server.spread()
        yield Pair(connector, prefill, decode, agents)


def _nixl(extra: dict[str, Any]) -> str:
    config = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    return json.dumps(config | ({"kv_connector_extra_config": extra} if extra else {}))


def _kvbus(attach: Path, module: str) -> str:
    return json.dumps(
        {
            "kv_connector": "KvbusConnector",
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"endpoint": str(attach)},
        }
    )
