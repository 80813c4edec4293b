"""Command-line options for keys."""

from pathlib import Path
from typing import Annotated

import typer

from kvbus.bus import ClientCurve, KeyPair
from kvbus.errors import ConfigError
from kvbus.keys.files import read_public, read_secret
from kvbus.variables import Variable

KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="KVBUS_KEY_FILE",
        help="Secret key of this command, for an agent with keys; `kvbus keys new` makes one.",
    ),
]
ServerKey = Annotated[
    str,
    typer.Option(
        metavar="KEY",
        envvar=Variable.SERVER_KEY,
        help="The public key of the agent, or a key file that has it.",
    ),
]
ServerKeys = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        envvar=Variable.SERVER_KEY,
        help="The public key of the agent, or a key file that has it; for several agents once for "
        "each, in the same order.",
    ),
]


def curves_of(
    key_file: Path | None, server_keys: list[str], num_agents: int
) -> tuple[KeyPair | None, list[str]]:
    """Raise `ConfigError`."""
    if key_file is not None and len(server_keys) != num_agents:
        raise ConfigError(
            f"--server-key: given {len(server_keys)} times for {num_agents} agents; an agent with "
            "keys needs its own server key"
        )
    curves = [one for key in server_keys if (one := curve_of(key_file, key)) is not None]
    if not curves:
        return None, [""] * num_agents
    return curves[0].keys, [one.server_key for one in curves]


def curve_of(key_file: Path | None, server_key: str) -> ClientCurve | None:
    """Return None without options. Raises `ConfigError` for only one."""
    if bool(key_file) != bool(server_key):
        missing = "--server-key" if key_file else "--key-file"
        raise ConfigError(f"{missing}: needed as well; an agent with keys requires both")
    if key_file is None:
        return None
    if Path(server_key).is_file():
        server_key = read_public(Path(server_key))
    return ClientCurve(read_secret(key_file), server_key)
