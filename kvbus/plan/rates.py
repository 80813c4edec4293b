"""Rates of a pair of agents from a TOML file, for plans of other machines.

Refuses, with a `ConfigError` of one line, keys that are no rate and values that are none.
"""

import tomllib
from dataclasses import fields
from pathlib import Path

from kvbus.errors import ConfigError, LocalError
from kvbus.planning.cost import Rates


def read_rates(path: Path) -> Rates:
    """The rates in ``path``; what it does not say is as on the development machine."""
    try:
        given = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"--rates: cannot read {str(path)!r}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--rates: {str(path)!r} is not TOML: {reason}") from error
    kinds = {field.name: field.type for field in fields(Rates)}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"--rates: {name!r} is not a key; keys are {', '.join(kinds)}")
        allowed = (int,) if kinds[name] in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ConfigError(f"--rates: {name}={value!r} is not a number of that kind")
    try:
        return Rates(**given)
    except LocalError as error:
        raise ConfigError(f"--rates: {error.message}") from error
