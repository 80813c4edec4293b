"""The command line of an agent: a config file, or the commented default of one."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import anyio
import structlog
import typer

from kvbus.agent.process.config import AgentConfig, commented_default, load_config
from kvbus.agent.process.logs import configure_logs
from kvbus.agent.process.run import run_agent
from kvbus.agent.process.service import Agent, Service
from kvbus.bus import new_boot_id
from kvbus.errors import ConfigError, KVBusError, leaves
from kvbus.protocol.engine import AgentRole

C = TypeVar("C", bound=AgentConfig)

log = structlog.get_logger()


def agent_command(
    role: AgentRole,
    config_kind: type[C],
    make_service: Callable[[Agent, C], Service],
    *,
    defaults: Mapping[str, str],
    name: str,
) -> Callable[[], None]:
    """The entry point of the agent ``name``."""

    def command(
        config: Annotated[
            Path | None, typer.Argument(metavar="CONFIG.toml", help="The agent's configuration.")
        ] = None,
        print_config: Annotated[
            bool, typer.Option("--print-config", help="Print a commented default and exit.")
        ] = False,
    ) -> None:
        if print_config:
            sys.stdout.write(commented_default(config_kind, **defaults))
            return
        if config is None:
            raise typer.BadParameter(
                f"no config given; make one with: {name} --print-config > {role}.toml"
            )
        _run(role, config_kind, make_service, config)

    command.__doc__ = f"Run a kvbus {role} agent beside one or more {role} engines of this machine."
    app = typer.Typer(add_completion=False)
    app.command(name)(command)
    return app


def _run(
    role: AgentRole, config_kind: type[C], make_service: Callable[[Agent, C], Service], path: Path
) -> None:
    try:
        config = load_config(config_kind, path)
    except ConfigError as error:
        raise SystemExit(_complain(error, status=2)) from error
    boot = new_boot_id()
    configure_logs(
        level=config.log_level, style=config.log_format, agent=config.agent_id, boot_id=boot
    )
    failures: list[KVBusError] = []
    try:
        anyio.run(run_agent, role, config, boot, lambda agent: make_service(agent, config))
    except* KVBusError as errors:
        failures = leaves(errors)
    for failure in failures:
        _complain(failure, status=1)
    if failures:
        raise SystemExit(1)


def _complain(error: KVBusError, *, status: int) -> int:
    sys.stderr.write(f"error: {error.message}\n")
    return status
