"""The command ``kvbus doctor``: its options, its families of checks, its progress, its exit status.

Refuses a wrong option or configuration with one line and exit status 2. A family that cannot be
checked does not end the others: that is a finding of its own.
"""

from collections.abc import Callable, Iterable
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from msgspec import ValidationError, convert

from kvbus.console import Console
from kvbus.doctor.agents import AgentSource, check_agents, wanted_agents
from kvbus.doctor.asking import PeerToCheck
from kvbus.doctor.children import Budget
from kvbus.doctor.cuda import check_cuda
from kvbus.doctor.finding import Finding, Severity, as_json, exit_status_of
from kvbus.doctor.host import check_limits, check_memory, check_processes
from kvbus.doctor.nixl import check_nixl
from kvbus.doctor.peer import check_peer
from kvbus.doctor.report import print_report
from kvbus.doctor.versions import check_versions
from kvbus.errors import ConfigError, KVBusError
from kvbus.keys.asker import KeyFile, ServerKey, curve_of
from kvbus.output import fail, write_json, write_text
from kvbus.protocol.message import Endpoint

EACH_SHARE = 0.25
"""The part of the whole time that one probe may take."""


class Family(StrEnum):
    """Checks that belong together, in the order in which they run."""

    VERSIONS = "versions"
    MEMORY = "memory"
    LIMITS = "limits"
    PROCESSES = "processes"
    NIXL = "nixl"
    CUDA = "cuda"
    AGENTS = "agents"
    PEER = "peer"


Configs = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Check the ports, folder and staging of this agent, and what memory it shares with "
        "others that run; may be repeated. Without it those of the agent of the environment "
        "(KVBUS_AGENT_ID …), or of both agents' defaults.",
    ),
]
Families = Annotated[
    list[Family] | None,
    typer.Option(
        metavar="FAMILY", help=f"Check one family only: {', '.join(Family)}; may be repeated."
    ),
]
PeerEndpoint = Annotated[
    str,
    typer.Option(
        metavar="ENDPOINT",
        help="Check whether this machine reaches the agent elsewhere at tcp://HOST:PORT, and where "
        "its KV is read from; with --key-file and --server-key where it has keys.",
    ),
]
Reader = Annotated[
    str,
    typer.Option(
        "--from",
        metavar="ENDPOINT",
        help="With --peer: the decode agent that reads from it. The two are compared as a pair, by "
        "what each says of the other.",
    ),
]
ReaderKey = Annotated[
    str,
    typer.Option(
        metavar="KEY", help="The public key of the agent at --from, or a key file that has it."
    ),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.1, max=3600, metavar="SECONDS", help="How long all measurements may take."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Let warnings fail, too.")]
AsOneJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def doctor(
    *,
    config: Configs = None,
    only: Families = None,
    peer: PeerEndpoint = "",
    key_file: KeyFile = None,
    server_key: ServerKey = "",
    reader: Reader = "",
    from_server_key: ReaderKey = "",
    timeout: Timeout = 60.0,
    strict: Strict = False,
    as_one_json: AsOneJson = False,
) -> None:
    """Say what works on this machine for kvbus, what does not, why, and what to do.

    Run it as the user, in the container and with the environment of the agents: limits, `UCX_TLS`
    and what may be read of other processes are those of this command. It measures NIXL between
    processes of its own, in some ten seconds, and leaves nothing behind.

    * `ok`: as it should be; `note`: worth knowing, nothing to do
    * `warning`: kvbus works, but slower or less of it than it could
    * `error`: kvbus, or the agent of a `--config`, does not work here

    Exit status 0: no error, kvbus works. 1: an error, or with `--strict` a warning. 2: a mistake
    in an option or a configuration.

    In a script that waits for a machine to be ready: `kvbus doctor --config agent.toml`, before
    the agent is started. Where a fast fabric is a must, add `--strict`.
    """
    try:
        agents = wanted_agents(config or [])
    except ConfigError as error:
        fail(f"--config: {error.message}", status=2, cause=error)
    elsewhere = _agent_to_check("--peer", peer, key_file, server_key)
    of_this_side = _reader_to_check(reader, peer, key_file, from_server_key)
    families = set(only or Family) - (set() if elsewhere else {Family.PEER})
    if not families:
        raise typer.BadParameter("--only peer needs --peer ENDPOINT as well")
    budget = Budget(timeout, EACH_SHARE * timeout)
    with Console(stderr=True).status("starting") as line:  # rich shows it on a terminal only
        findings = run_checks(
            families,
            agents,
            budget,
            lambda what: line.update(f"checking {what}"),
            peer=elsewhere,
            reader=of_this_side,
        )
    if as_one_json:
        write_json(as_json(findings, version=version("kvbus"), strict=strict))
    else:
        write_text(_as_text(findings))
    raise typer.Exit(exit_status_of(findings, strict=strict))


def run_checks(
    families: Iterable[Family],
    agents: list[AgentSource],
    budget: Budget,
    on_progress: Callable[[str], None],
    *,
    peer: PeerToCheck | None = None,
    reader: PeerToCheck | None = None,
) -> list[Finding]:
    """The findings of these families, in the order of `Family`."""
    checks: dict[Family, Callable[[], Iterable[Finding]]] = {
        Family.VERSIONS: check_versions,
        Family.MEMORY: check_memory,
        Family.LIMITS: check_limits,
        Family.PROCESSES: lambda: check_processes(budget),
        Family.NIXL: lambda: check_nixl(budget, on_progress),
        Family.CUDA: lambda: check_cuda(budget),
        Family.AGENTS: lambda: check_agents(agents),
        Family.PEER: lambda: check_peer(peer, reader) if peer else (),
    }
    findings: list[Finding] = []
    for family in Family:
        if family not in families:
            continue
        on_progress(family.value)
        try:
            findings += checks[family]()
        except (OSError, ValueError, KeyError, KVBusError) as error:
            unchecked = Finding(
                f"{family}.unchecked",
                Severity.WARNING,
                f"this could not be checked: {error}",
                {"error": str(error)},
                why="It is not known whether this works.",
                fix="Fix what the message says, and run kvbus doctor again.",
            )
            findings.append(unchecked)
    return findings


def _reader_to_check(
    reader: str, peer: str, key_file: Path | None, server_key: str
) -> PeerToCheck | None:
    if reader and not peer:
        raise typer.BadParameter("--from needs --peer ENDPOINT as well")
    if reader and reader == peer:
        raise typer.BadParameter("--from and --peer are the same agent: name the two of a pair")
    if server_key and not reader:
        raise typer.BadParameter("--from-server-key needs --from ENDPOINT as well")
    return _agent_to_check("--from", reader, key_file if server_key else None, server_key)


def _agent_to_check(
    option: str, endpoint: str, key_file: Path | None, server_key: str
) -> PeerToCheck | None:
    if not endpoint:
        return None
    try:
        convert(endpoint, Endpoint)
        return PeerToCheck(endpoint, curve_of(key_file, server_key))
    except ValidationError as error:
        fail(f"{option}: {endpoint!r} is not tcp://HOST:PORT", status=2, cause=error)
    except ConfigError as error:
        fail(f"{option}: {error.message}", status=2, cause=error)


def _as_text(findings: list[Finding]) -> str:
    console = Console()
    with console.capture() as printed:
        print_report(findings, console)
    return "".join(f"{line.rstrip()}\n" for line in printed.get().splitlines())
