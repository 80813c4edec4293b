"""The command line of an agent: a config file and settings, or the commented default of a file.

Read by argparse: the import of typer is a fifth of the time that an agent takes to start.
"""

import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

import anyio
import msgspec
import structlog
from msgspec import Meta

from kvbus.agent.config import AgentConfig, load_config
from kvbus.agent.loop import AgentLoop
from kvbus.agent.observe import configure_logs
from kvbus.agent.run import run_agent
from kvbus.agent.service import Agent, Service
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
            _run(role, make_service, load)

    return command


def _run(
    role: AgentRole,
    make_service: Callable[[Agent, C], Service],
    load: Callable[[], C],
) -> None:
    try:
        config = load()
    except ConfigError as error:
        raise SystemExit(_complain(error, status=2)) from error
    boot = new_boot_id()
    configure_logs(
        level=config.log_level, style=config.log_format, agent=config.agent_id, boot_id=boot
    )
    failures: list[KVBusError] = []
    try:
        anyio.run(
            run_agent,
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
    _exit(1 if failures else 0)


# Everything is given back by now. What is left are threads, which nothing can end: Python would
# wait for one whose copy hangs, as it does for a GPU that does not answer, and the process would
# stay for ever. The destructors of libraries that such a thread is in are not run, either.
def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _complain(error: KVBusError, *, status: int) -> int:
    sys.stderr.write(f"error: {error.message}\n")
    return status


def commented_default(kind: type[AgentConfig], **values: str) -> str:
    """A TOML file with every key, its meaning and its default; ``values`` fill required keys."""
    return "\n".join(_comment_lines(kind, dict(values), prefix="")) + "\n"


def _comment_lines(
    kind: type[msgspec.Struct], values: dict[str, Any], prefix: str
) -> Iterator[str]:
    hints = get_type_hints(kind, include_extras=True)
    sections: list[tuple[str, type[msgspec.Struct]]] = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            sections.append((field.name, hint))
            continue
        yield f"# {_description(hint)}"
        yield f"{field.name} = {_toml(values.get(field.name, field.default))}"
        yield ""
    for name, section in sections:
        yield f"[{prefix}{name}]"
        yield from _comment_lines(section, {}, prefix=f"{prefix}{name}.")


def _description(hint: Any) -> str:
    found = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, Meta)]
    return next((text for text in reversed(found) if text), "")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
