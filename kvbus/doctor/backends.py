"""Checks of NIXL's backends: its plugins, and a READ with each backend of the agents' configs.

python -m kvbus.doctor.backends plugins
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio
import msgspec

from kvbus.agent.config import AgentConfig
from kvbus.agent.data_plane import choose_interfaces, nixl_environment
from kvbus.agent.probe import measure_read
from kvbus.data.messages import HOST, UCX_ONLY
from kvbus.doctor.finding import ERROR, OK, WARNING, Finding
from kvbus.errors import ConfigError, KVBusError, leaves
from kvbus.lab.process import engine_process, run_program, serve
from kvbus.output import waiting_for
from kvbus.text import rate_text


class PluginReport(msgspec.Struct, frozen=True):
    """Plugin of NIXL; ``problem`` is the reason why it cannot be loaded here."""

    memory_kinds: tuple[str, ...]
    parameters: dict[str, str]
    problem: str


PluginReports = dict[str, PluginReport]


def check_backends(agents: Sequence[tuple[str, AgentConfig]], limit_s: float) -> Iterator[Finding]:
    with waiting_for("the plugins of NIXL"):
        yield _plugins_finding(limit_s)
    checked = set[str]()
    for source, config in agents:
        for name, parameters in config.backends.items():
            if name not in checked and {name: parameters} != UCX_ONLY:
                checked.add(name)
                yield _check_read(source, config, name, parameters, limit_s)


def _plugins_finding(limit_s: float) -> Finding:
    try:
        plugins = anyio.run(_list_plugins, limit_s)
    except* KVBusError as errors:
        problem = leaves(errors)[0].message.partition("\n")[0]
    except* TimeoutError:
        problem = f"no answer within {limit_s:.3g} s; --timeout gives more"
    else:
        return plugins_finding(plugins)
    return Finding(
        "nixl.plugins",
        WARNING,
        f"NIXL's plugins cannot be listed: {problem}",
        {"error": problem},
        why="It is not known which backends agents could use.",
        fix="Install NIXL as required, see versions.nixl.",
    )


def plugins_finding(plugins: PluginReports) -> Finding:
    usable = [
        f"{name} ({', '.join(one.memory_kinds)}{_listed(one.parameters)})"
        for name, one in plugins.items()
        if not one.problem
    ]
    broken = [f"{name} ({one.problem})" for name, one in plugins.items() if one.problem]
    found = f"can be loaded: {', '.join(usable) or 'none'}"
    if broken:
        found += f"; cannot be loaded: {', '.join(broken)}"
    return Finding("nixl.plugins", OK, found, {"plugins": msgspec.to_builtins(plugins)})


def _listed(parameters: Mapping[str, str]) -> str:
    return "".join(f"; {key}={value}" for key, value in sorted(parameters.items()))


async def _list_plugins(limit_s: float) -> PluginReports:
    with tempfile.TemporaryDirectory(prefix="kvbus-doctor-") as folder, anyio.fail_after(limit_s):
        start = partial(engine_process, log=Path(folder) / "log")
        async with start("NIXL's plugins", "kvbus.doctor.backends", "plugins") as process:
            return await process.request(PluginReports, "plugins")


def _check_read(
    source: str, config: AgentConfig, name: str, parameters: Mapping[str, str], limit_s: float
) -> Finding:
    try:
        env = nixl_environment(choose_interfaces(config), config.data_ports)
    except ConfigError:  # the family `agents` reports it
        env = {}
    with waiting_for(f"a NIXL READ with the backend {name}"):
        measure = partial(measure_read, HOST, limit_s=limit_s, backends={name: parameters}, env=env)
        read = anyio.run(measure)
    rate, error = read.bytes_per_s, read.error
    return Finding(
        f"nixl.read.{name}",
        OK if rate else ERROR,
        f"{rate_text(rate)} with the backend {name}" if rate else f"fails with {name}: {error}",
        {
            "backend": name,
            "parameters": dict(parameters),
            "bytes_per_s": rate or None,
            "error": error,
        },
        why=f"nixl_backends names it ({source}).",
        fix="Install what it needs, see nixl.plugins; or correct nixl_backends, "
        "nixl_backend_params and data_interfaces.",
    )


class PluginProbe:
    def plugins(self) -> PluginReports:
        from kvbus.data.nixl_agent import Plugins  # noqa: PLC0415  # in the probe process only

        plugins = Plugins()
        found = {name: plugins.load(name) for name in plugins.names}
        return {
            name: msgspec.convert(one, PluginReport, from_attributes=True)
            for name, one in found.items()
        }


if __name__ == "__main__":
    run_program(partial(serve, PluginProbe()))
    os._exit(0)  # plugins may hang in their destructors
