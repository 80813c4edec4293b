"""What the time of a plan depends on: the rates of a pair of agents, and the size of their slots.

Refuses, with a `ConfigError` of one line, keys that are no rate and values that are none.
"""

from dataclasses import dataclass, fields
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.plan.spec import read_toml
from kvbus.planning.cost import Rates

DEFAULT_SLOT_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class CostInputs:
    """Without ``rates_from``, the name of a file, the rates are the defaults."""

    rates: Rates
    rates_from: str | None = None
    slot_bytes: int = DEFAULT_SLOT_BYTES


def read_rates(path: Path) -> Rates:
    """The rates in ``path``; what it does not say is as on the development machine."""
    given = read_toml(path, "cannot be read")
    kinds = {field.name: field.type for field in fields(Rates)}
    for name, value in given.items():
        if name not in kinds:
            raise ConfigError(f"{name!r} is not a key; keys are {', '.join(kinds)}")
        allowed = (int,) if kinds[name] in (int, "int") else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ConfigError(f"{name}={value!r} is not a number of that kind")
    return Rates(**given)  # type: ignore[arg-type]  # checked just now
