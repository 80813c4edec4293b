"""The keys of a tool that asks agents, its own and the agent's, as options of its command."""

from pathlib import Path
from typing import Annotated

import typer

from kvbus.bus import ClientCurve
from kvbus.errors import ConfigError
from kvbus.keys.files import read_public, read_secret

KeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="KVBUS_KEY_FILE",
        help="Our secret key, for an agent with keys; made by `kvbus keys new`.",
    ),
]
ServerKey = Annotated[
    str,
    typer.Option(
        metavar="KEY",
        envvar="KVBUS_SERVER_KEY",
        help="The public key of the agent, or a key file that has it.",
    ),
]


def curve_of(key_file: Path | None, server_key: str) -> ClientCurve | None:
    """The two keys, or none; raises `ConfigError` for one of them alone, and for what is no key."""
    if bool(key_file) != bool(server_key):
        missing = "--server-key" if key_file else "--key-file"
        raise ConfigError(f"{missing}: needed as well; an agent with keys is asked with both")
    if key_file is None:
        return None
    if Path(server_key).is_file():
        server_key = read_public(Path(server_key))
    return ClientCurve(read_secret(key_file), server_key)
