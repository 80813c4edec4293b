"""Says how a command on a line of shell is given keys: for lines that people copy."""

from shlex import quote


def key_options(key_file: str, server_key: str) -> str:
    """The options that ask an agent with this key, with a space before; empty without keys."""
    if not (key_file and server_key):
        return ""
    return f" --key-file {quote(key_file)} --server-key={quote(server_key)}"
