"""Writes the generated lists of ``reference.md``: ``python docs/generate_reference.py``.

Texts are the help of commands, the strings below keys of the configuration, and those that agents
serve with their metrics.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from kvbus.agent.access import KEYS_READINGS
from kvbus.agent.command import meanings_of
from kvbus.agent.config import AgentConfig
from kvbus.agent.observe import AgentMetrics
from kvbus.agent.runtime import BUS_READINGS, DATA_READINGS
from kvbus.cli import PANELS
from kvbus_decode.config import DecodeConfig
from kvbus_decode.fetch_reports import READINGS as DECODE_READINGS
from kvbus_decode.fetch_reports import DecodeMetrics
from kvbus_prefill.config import PrefillConfig
from kvbus_prefill.offer_reports import READINGS as PREFILL_READINGS
from kvbus_prefill.offer_reports import PrefillMetrics

PAGE = Path(__file__).with_name("reference.md")
MIB = 1024**2
PROCESS = "process_"
"""How metrics of the process are called, which prometheus_client makes."""


def page() -> str:
    """The page with all between its markers made again."""
    prefill = _metrics(PrefillMetrics, PREFILL_READINGS)
    decode = _metrics(DecodeMetrics, DECODE_READINGS)
    both = {name for name, line in prefill.items() if line == decode.get(name)}
    made = {
        "commands": _commands(),
        "keys-both": _keys(AgentConfig, {}),
        "keys-prefill": _keys(PrefillConfig, meanings_of(AgentConfig)),
        "keys-decode": _keys(DecodeConfig, meanings_of(AgentConfig)),
        "metrics-both": (prefill[name] for name in prefill if name in both),
        "metrics-prefill": (prefill[name] for name in prefill if name not in both),
        "metrics-decode": (decode[name] for name in decode if name not in both),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, lines in made.items():
        start, end = f"<!-- generated: {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(start)
        text = "\n".join([before + start, *lines, "", rest[rest.index(end) :]])
    return text


def _commands() -> Iterator[str]:
    for panel, names in PANELS.items():
        yield f"- {panel}: {', '.join(f'`kvbus {name}`' for name in names)}"


def _keys(kind: type[AgentConfig], known: Mapping[str, str]) -> Iterator[str]:
    meanings = meanings_of(kind)
    for field in msgspec.structs.fields(kind):
        if field.name not in known:
            yield f"- `{field.name}`{_default(field)}: {meanings[field.name]}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    """What a key is when it is absent; nothing when that is empty, or the key is needed."""
    match field.default:
        case bool(value):
            return f" ({str(value).lower()})"
        case int(value) if field.name.endswith("_bytes"):
            return f" ({value // MIB} MiB)"
        case int(value) | float(value):
            return f" ({value:g})"
        case str(value) if value:
            return f" ({value})"
        case tuple(value) if value:
            return f" ({json.dumps(value)})"
    return ""


def _metrics(
    made_by: Callable[[AgentMetrics], object], readings: Mapping[str, str]
) -> dict[str, str]:
    """By its name, the line of each metric that a kind of agent has."""
    agent = AgentMetrics()
    made_by(agent)
    lines = {}
    for each in agent.registry.collect():
        if not each.name.startswith(PROCESS):
            name = f"{each.name}_total" if each.type == "counter" else each.name
            labels = ", ".join(getattr(each, "_labelnames", ()))
            named = f"{name}{{{labels}}}" if labels else name
            kind = " (histogram)" if each.type == "histogram" else ""
            lines[name] = f"- `{named}`{kind}: {each.documentation}"
    for name, meaning in {**BUS_READINGS, **KEYS_READINGS, **DATA_READINGS, **readings}.items():
        lines[name] = f"- `kvbus_{name}`: {meaning}"
    return lines


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
