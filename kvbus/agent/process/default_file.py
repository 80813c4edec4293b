"""The commented default of an agent's configuration file, made from its keys."""

from collections.abc import Iterator
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Meta

from kvbus.agent.process.config import AgentConfig


def commented_default(kind: type[AgentConfig], **values: str) -> str:
    """A TOML file with every key, its meaning and its default; ``values`` fill required keys."""
    return "\n".join(_comment_lines(kind, dict(values), prefix="")) + "\n"


def _comment_lines(
    kind: type[msgspec.Struct], values: dict[str, Any], prefix: str
) -> Iterator[str]:
    hints = get_type_hints(kind, include_extras=True)
    sections: list[tuple[str, type[msgspec.Struct]]] = []
    for field in msgspec.structs.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            sections.append((field.name, hint))
            continue
        yield f"# {_description(hint)}"
        yield f"{field.name} = {_toml(values.get(field.name, field.default))}"
        yield ""
    for name, section in sections:
        yield f"[{prefix}{name}]"
        yield from _comment_lines(section, {}, prefix=f"{prefix}{name}.")


def _description(hint: Any) -> str:
    found = [meta.description for meta in get_args(hint)[1:] if isinstance(meta, Meta)]
    return next((text for text in reversed(found) if text), "")


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(one) for one in value)}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)
