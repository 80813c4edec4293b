"""The commands ``kvbus keys``; they print no secret key."""

from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvbus.bus import new_key_pair
from kvbus.console import Console
from kvbus.errors import ConfigError
from kvbus.keys.files import read, read_public, write_secret
from kvbus.keys.trusted import MAX_BYTES, TrustedKey, TrustedKeys, revoke_trusted, write_trusted
from kvbus.options import completed_by
from kvbus.output import complain, write_json, write_text
from kvbus.protocol.message import Role

MAX_PROBLEMS = 3
DASH_FIRST = {"ignore_unknown_options": True}
"""One public key in 85 begins with a dash."""

keys = typer.Typer(
    help="Make, show, trust and revoke the CURVE keys of agents, routers and tools.",
    no_args_is_help=True,
    add_completion=False,
)

_Trusted = Annotated[
    Path, typer.Argument(metavar="FILE", help="The authorized_keys file of an agent.")
]


@keys.command()
def new(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Where the secret key goes; key_file names it.")
    ],
) -> None:
    """Create a key pair: write the secret key to FILE, and print the public key."""
    pair = new_key_pair()
    write_secret(path, pair)
    write_text(pair.public + "\n")


@keys.command()
def show(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="A key file, or a file of trusted keys.")
    ],
    as_one_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the public key in a key file, or the names and roles in a file of trusted keys."""
    lines = read(path, lambda *_: None, MAX_BYTES).splitlines()  # with any file mode
    if any(line.startswith((b"public_key", b"secret_key")) for line in lines):
        key = read_public(path)
        if as_one_json:
            write_json({"public_key": key})
        else:
            write_text(key + "\n")
        return
    trusted = TrustedKeys(path)
    if as_one_json:
        found = [
            {"name": one.name, "roles": sorted(one.roles), "public_key": one.key} for one in trusted
        ]
        write_json({"keys": found, "problems": trusted.problems})
    else:
        table = Table("name", "roles", "public key", box=SIMPLE_HEAD, show_edge=False)
        for one in trusted:
            table.add_row(one.name, ", ".join(sorted(one.roles)), one.key)
        if table.row_count or not trusted.problems:
            Console().print(table)
    shown = list(trusted.problems[:MAX_PROBLEMS])
    if (num_more := len(trusted.problems) - len(shown)) > 0:
        shown.append(f"{path}: {num_more} more lines are wrong")
    for problem in shown:
        complain(problem)
    if trusted.problems:
        raise typer.Exit(1)


@keys.command(context_settings=DASH_FIRST)
def trust(
    file: _Trusted,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A public key, or a key file that has it.")
    ],
    name: Annotated[str, typer.Option(help="What the key is called, such as decode-0.")],
    role: Annotated[
        list[str],
        typer.Option(
            metavar="ROLE",
            help=f"{', '.join(Role)}; may be repeated.",
            autocompletion=completed_by(Role),
        ),
    ],
) -> None:
    """Trust a public key in one or more roles. Running agents apply it within a second."""
    if Path(key).is_file():
        key = read_public(Path(key))
    trusted = TrustedKey.read(f"{name} {','.join(role)} {key}")
    write_trusted(file, trusted)
    write_text(f"{trusted}\n")


@keys.command(context_settings=DASH_FIRST)
def revoke(
    file: _Trusted,
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="The name or the public key that it was given.")
    ],
) -> None:
    """Revoke a trusted key. Running agents end its sessions within a second."""
    revoked = revoke_trusted(file, key)
    if not revoked:
        raise ConfigError(f"{file} trusts no key {key!r}; see: kvbus keys show {file}")
    for one in revoked:
        write_text(f"{one}\n")
