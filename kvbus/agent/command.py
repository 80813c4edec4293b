"""The command line of an agent; argparse, as typer takes a fifth of its start time."""

import ast
import inspect
import os
import sys
from argparse import ArgumentParser
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NoReturn, TypeVar

import anyio
import msgspec
import structlog

from kvbus.agent.completion import SHELLS, completion_script
from kvbus.agent.config import DEFAULTS, AgentConfig, load_config
from kvbus.agent.loop import AgentLoop
from kvbus.agent.observe import configure_logs
from kvbus.agent.runtime import run_agent
from kvbus.agent.service import Agent, Service
from kvbus.bus import new_boot_id
from kvbus.errors import ConfigError, KVBusError, leaves
from kvbus.protocol.engine import AgentRole

C = TypeVar("C", bound=AgentConfig)

log = structlog.get_logger()


def run_command(
    role: AgentRole, kind: type[C], make_service: Callable[[Agent, C], Service]
) -> None:
    options = _parser(role).parse_args()
    if options.print_config:
        _print(commented_default(kind, **DEFAULTS[role]))
        return
    if options.show_completion:
        keys = (field.name for field in msgspec.structs.fields(kind))
        _print(completion_script(options.show_completion, f"kvbus-{role}", keys))
        return
    try:
        config = load_config(kind, options.config, settings=options.settings)
    except ConfigError as error:
        raise SystemExit(_complain(error, status=2)) from error
    boot = new_boot_id()
    flush_logs = configure_logs(level=config.log_level, agent=config.agent_id, boot_id=boot)
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
    flush_logs()
    _exit(1 if failures else 0)


def _parser(role: AgentRole) -> ArgumentParser:
    parser = ArgumentParser(
        prog=f"kvbus-{role}",
        description=f"Run a kvbus {role} agent beside one or more {role} engines of this machine.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG.toml",
        help="the agent's configuration; variables KVBUS_KEY override it, and do without it",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="override one key, such as slot_bytes=1048576; may be repeated",
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print a commented default and exit"
    )
    parser.add_argument(
        "--show-completion",
        choices=SHELLS,
        help="print a script that completes this command in a shell, and exit",
    )
    return parser


def _print(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except OSError as error:
        raise SystemExit(f"error: cannot write to stdout: {error.strerror}") from error


# All resources have been released by now. Only threads remain, and nothing can stop a thread:
# Python would wait for ever for one that hangs, for example in a copy from a GPU that does not
# answer. `os._exit` also skips the destructors of libraries that such a thread is still using.
def _exit(status: int) -> NoReturn:
    sys.stdout.flush()
    os._exit(status)


def _complain(error: KVBusError, *, status: int) -> int:
    sys.stderr.write(f"error: {error.message}\n")
    return status


def commented_default(kind: type[AgentConfig], **values: str) -> str:
    meanings, lines = meanings_of(kind), list[str]()
    for field in msgspec.structs.fields(kind):
        is_made = field.default_factory is not msgspec.NODEFAULT
        default = field.default_factory() if is_made else field.default
        value = _toml(values.get(field.name, default))
        lines += [f"# {meanings[field.name]}", f"{field.name} = {value}", ""]
    return "\n".join(lines)


def meanings_of(kind: type[AgentConfig]) -> dict[str, str]:
    found: dict[str, str] = {}
    for base in kind.__mro__[kind.__mro__.index(AgentConfig) :: -1]:  # subclasses last
        (declared,) = ast.parse(inspect.getsource(base)).body
        body = declared.body if isinstance(declared, ast.ClassDef) else ()
        for statement, following in pairwise(body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
