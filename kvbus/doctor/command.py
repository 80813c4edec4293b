"""The command ``kvbus doctor``: options, families of checks, exit status."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from msgspec import ValidationError, convert

from kvbus.console import text_of
from kvbus.doctor.agents import check_agents, wanted_agents
from kvbus.doctor.backends import check_backends
from kvbus.doctor.data_plane import check_nixl
from kvbus.doctor.finding import WARNING, Finding, Report
from kvbus.doctor.gpus import check_gpus
from kvbus.doctor.host import check_limits, check_memory, check_versions
from kvbus.doctor.peers import QueriedAgent, check_peer
from kvbus.errors import ConfigError, KVBusError
from kvbus.keys.client_options import KeyFile, ServerKey, curve_of
from kvbus.options import completed_by, with_options
from kvbus.output import write_json, write_text
from kvbus.progress import Progress
from kvbus.protocol.message import Endpoint

FAMILIES = ("versions", "memory", "limits", "nixl", "cuda", "agents", "peer")
Check = Callable[[], Iterable[Finding]]


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    config: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Check the ports, folder and staging of this agent, and what memory it shares "
            "with others that run; may be repeated. Without it those of the agent of the "
            "environment (KVBUS_AGENT_ID ...), or of both agents' defaults.",
        ),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FAMILY",
            help=f"Check one family only: {', '.join(FAMILIES)}; may be repeated.",
            autocompletion=completed_by(FAMILIES),
        ),
    ] = None
    peer: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Check whether this machine reaches the agent elsewhere at tcp://HOST:PORT, and "
            "where its KV is read from; with --key-file and --server-key where it has keys.",
        ),
    ] = ""
    key_file: KeyFile = None
    server_key: ServerKey = ""
    reader: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="ENDPOINT",
            help="With --peer: the decode agent that reads from it. The two are compared as a "
            "pair, by what each reports of the other.",
        ),
    ] = ""
    from_server_key: Annotated[
        str,
        typer.Option(
            metavar="KEY",
            help="The public key of the agent at --from, or a key file that has it.",
        ),
    ] = ""
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1, max=3600, metavar="SECONDS", help="How long each measurement may take."
        ),
    ] = 15.0
    strict: Annotated[bool, typer.Option("--strict", help="Let warnings fail, too.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False

    def __post_init__(self) -> None:
        for family in self.only or ():
            if family not in FAMILIES:
                raise ConfigError(f"--only: {family!r} is none of {', '.join(FAMILIES)}")
        if self.only == ["peer"] and not self.peer:
            raise ConfigError("--only peer needs --peer ENDPOINT as well")
        if self.reader and not self.peer:
            raise ConfigError("--from needs --peer ENDPOINT as well")
        if self.reader and self.reader == self.peer:
            raise ConfigError("--from and --peer are the same agent: name the two of a pair")
        if self.from_server_key and not self.reader:
            raise ConfigError("--from-server-key needs --from ENDPOINT as well")


@with_options(DoctorOptions)
def doctor(options: DoctorOptions) -> None:
    """Check what works on this machine for kvbus, and explain how to fix the rest.

    Run it as the user, in the container and with the environment of the agents: it checks its own
    limits, `UCX_TLS` and rights to read other processes. It measures NIXL between its own processes
    in about 10 s, and leaves nothing behind.

    * `ok`: as it should be; `note`: worth knowing, nothing to do
    * `warning`: kvbus works, but slower or with fewer features than possible
    * `error`: kvbus, or the agent of a `--config`, does not work here

    Exit status 0: no error, kvbus works. 1: an error, or with `--strict` a warning. 2: a mistake in
    an option or a configuration.

    To wait in a script until a machine is ready, run `kvbus doctor --config agent.toml` before the
    agent starts. If a fast fabric is required, add `--strict`.
    """
    checks = _checks(options)
    families = [one for one in FAMILIES if not options.only or one in options.only]
    found = list[Finding]()
    with Progress(len(families)) as progress:
        for family in families:
            progress.begin(f"checking {family}")
            found += _checked(family, checks[family])
    report = Report(found, strict=options.strict)
    if options.as_json:
        write_json(report.as_json(version("kvbus")))
    else:
        write_text(text_of(*report.shown()))
    raise typer.Exit(report.exit_status)


def _checks(options: DoctorOptions) -> dict[str, Check]:
    try:
        agents = wanted_agents(options.config or [])
    except ConfigError as error:
        raise ConfigError(f"--config: {error.message}") from error
    peer = _peer("--peer", options.peer, options.key_file, options.server_key)
    key_file = options.key_file if options.from_server_key else None
    reader = _peer("--from", options.reader, key_file, options.from_server_key)
    return {
        "versions": check_versions,
        "memory": check_memory,
        "limits": check_limits,
        "nixl": lambda: chain(check_nixl(options.timeout), check_backends(agents, options.timeout)),
        "cuda": lambda: check_gpus(options.timeout),
        "agents": lambda: check_agents(agents),
        "peer": lambda: check_peer(peer, reader) if peer else (),
    }


def _checked(family: str, check: Check) -> Iterable[Finding]:
    """Run a check; report its failure as a finding, so that the others continue."""
    try:
        yield from check()
    except (OSError, ValueError, KeyError, KVBusError) as error:
        yield Finding(
            f"{family}.unchecked",
            WARNING,
            f"this could not be checked: {error}",
            {"error": str(error)},
            why="It is not known whether this works.",
            fix="Fix the cause that the message names, and run kvbus doctor again.",
        )


def _peer(
    option: str, endpoint: str, key_file: Path | None, server_key: str
) -> QueriedAgent | None:
    if not endpoint:
        return None
    try:
        convert(endpoint, Endpoint)
        return QueriedAgent(endpoint, curve_of(key_file, server_key))
    except ValidationError as error:
        raise ConfigError(f"{option}: {endpoint!r} is not tcp://HOST:PORT") from error
    except ConfigError as error:
        raise ConfigError(f"{option}: {error.message}") from error
