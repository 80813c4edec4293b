"""The command line of an agent: a config file and settings, or the commented default of a file.

Read by argparse: the import of typer is a fifth of the time that an agent takes to start.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import structlog

from kvbus.agent.process.addresses import BINDS, check_room_beside
from kvbus.agent.process.config import AgentConfig, load_config
from kvbus.agent.process.default_file import commented_default
from kvbus.agent.process.logs import configure_logs
from kvbus.agent.process.loop import AgentLoop
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

    parser = ArgumentParser(
        prog=name,
        description=f"Run a kvbus {role} agent beside one or more {role} engines of this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG.toml",
        help="the agent's configuration; variables KVBUS_KEY, KVBUS_SECTION__KEY override it, and "
        "do without it",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="override one key, such as transport.slice_bytes=1048576; may be repeated",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="take over from the agent that runs with this configuration, if there is one, without "
        "a loss to its engines; it ends by itself",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print a commented default and exit"
    )

    def command() -> None:
        options = parser.parse_args()
        if options.print_config:
            try:
                print(commented_default(config_kind, **defaults), end="", flush=True)
            except OSError as error:
                parser.exit(1, f"error: cannot write to stdout: {error.strerror}\n")
        else:
            load = partial(load_config, config_kind, options.config, settings=options.settings)
            _run(role, make_service, load, replaces=options.replace)

    return command


def _run(
    role: AgentRole,
    make_service: Callable[[Agent, C], Service],
    load: Callable[[], C],
    *,
    replaces: bool,
) -> None:
    try:
        config = load()
        if replaces:
            for key in BINDS:
                check_room_beside(getattr(config, key), key=key)
    except ConfigError as error:
        raise SystemExit(_complain(error, status=2)) from error
    boot = new_boot_id()
    configure_logs(
        level=config.log_level, style=config.log_format, agent=config.agent_id, boot_id=boot
    )
    failures: list[KVBusError] = []
    try:
        run = partial(run_agent, replaces=replaces)
        anyio.run(
            run,
            role,
            config,
            boot,
            lambda agent: make_service(agent, config),
            backend_options={"loop_factory": AgentLoop},
        )
    except* KVBusError as errors:
        failures = leaves(errors)
    for failure in failures:
        _complain(failure, status=1)
    if failures:
        raise SystemExit(1)


def _complain(error: KVBusError, *, status: int) -> int:
    sys.stderr.write(f"error: {error.message}\n")
    return status
