"""Writes what each engine hands off and refuses: ``docs/generate_kinds.py``.

Tests name what they show with the mark ``kind``. Refusals are the calls of `require` and `_refuse`
in the integrations. Neither vLLM nor SGLang is imported.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engine-support.md"
BEGIN, END = "<!-- Written by `docs/generate_kinds.py`. -->", "<!-- End of it. -->"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
LEVELS = {
    "servers: same tokens as one server alone": ("servers",),
    "parts of the engine, no model": ("scheduler", "memory"),
}
REFUSE = {"require": 2, "_refuse": 1}
"""Functions that refuse, and the number of the argument that says what."""
BY_KIND = "SETTINGS"
"""A table of remedies by the kind of a pool."""
UNKNOWN = "…"
"""A value that is known at run time."""
MISMATCH = 2
"""So many values without a remedy are about numbers of the engine that contradict each other."""
REMEDY = re.compile(
    r"(?:: |\. )(?:start (?:vLLM|both servers) )?((?:set|start|use|with|unset|serve|leave).*)",
    re.IGNORECASE,
)
NAME = re.compile(r"(--[\w-]+|\w+_\w+)")


def table() -> str:
    """The generated part of the page."""
    return "\n".join([BEGIN, "", *_tested(), "", *_refused(), "", END])


def page() -> str:
    """The whole of docs/engine-support.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + table() + after


def _tested() -> Iterator[str]:
    yield from ("## Tested", "", f"| tested with | {' | '.join(ENGINES.values())} |")
    yield "| --- |" + " --- |" * len(ENGINES)
    of_engine = {engine: marks(ROOT / "tests" / "e2e" / engine) for engine in ENGINES}
    for title, levels in LEVELS.items():
        names = (sorted(name for on, name in of_engine[one] if on in levels) for one in ENGINES)
        yield f"| {title} | {' | '.join('; '.join(one) for one in names)} |"


def _refused() -> Iterator[str]:
    yield from ("## Refused at startup", "", "The error names the reason and the remedy.")
    for engine, title in ENGINES.items():
        yield from ("", f"### {title}", "", "| refused | use instead |", "| --- | --- |")
        by_remedy: dict[str, dict[str, None]] = defaultdict(dict)
        for path in sorted((ROOT / "kvbus" / "integrations" / engine).glob("*.py")):
            for text in refusals(path):
                what, remedy = parts_of(text)
                if remedy or what.count(UNKNOWN) < MISMATCH:
                    by_remedy[remedy][what] = None
        for remedy, refused in by_remedy.items():
            yield f"| {'; '.join(refused)} | {remedy or '—'} |"


def parts_of(text: str) -> tuple[str, str]:
    """Split a refusal into what is refused and the remedy; empty if there is none.

    A refusal reads "what: reason. Remedy", without reason or remedy if there is none.
    """
    what = text.partition(": ")[0]
    found = REMEDY.search(text)
    if found and found.start() < len(what):
        what = text[: found.start()]
    remedy = found[1] if found else ""
    return _marked(what.replace(f" ({UNKNOWN})", "")), _marked(remedy[:1].lower() + remedy[1:])


def _marked(text: str) -> str:
    return NAME.sub(r"`\1`", text)


def marks(folder: Path) -> set[tuple[str, str]]:
    """Level and name of each mark ``kind``."""
    found = set()
    for path in folder.glob("test_*.py"):
        for call in _calls(path):
            if ast.unparse(call.func) == "pytest.mark.kind":
                (name,), (on,) = call.args, [one.value for one in call.keywords]
                found.add((ast.literal_eval(on), ast.literal_eval(name)))
    return found


def refusals(path: Path) -> Iterator[str]:
    """What each refusal says."""
    tree = ast.parse(path.read_text())
    shared = _constants(tree.body)
    for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)):
        known = {**shared, **_constants([*ast.walk(function)])}
        for call in (one for one in ast.walk(function) if isinstance(one, ast.Call)):
            if (name := ast.unparse(call.func)) in REFUSE and len(call.args) > REFUSE[name]:
                texts = [_text(one, known) for one in call.args[REFUSE[name] :]]
                settings = shared.get(BY_KIND)
                if texts[-1] == UNKNOWN and isinstance(settings, ast.Dict):
                    yield from _by_kind(settings, shared)
                elif texts[0].strip(f"{UNKNOWN} "):
                    yield ": ".join(texts).replace(f"{UNKNOWN} ...", UNKNOWN)


def _by_kind(settings: ast.Dict, constants: Mapping[str, ast.expr]) -> Iterator[str]:
    for kind, setting in zip(settings.keys, settings.values, strict=True):
        if kind is not None:
            yield f"{_text(kind, {})} pools: {_text(setting, constants)}"


def _constants(nodes: Iterable[ast.AST]) -> dict[str, ast.expr]:
    return {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


def _calls(path: Path) -> Iterator[ast.Call]:
    nodes = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.Call)]
    yield from sorted(nodes, key=lambda one: one.lineno)


def _text(node: ast.expr, constants: Mapping[str, ast.expr]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(one, constants) for one in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return _text(constants[node.id], {})
    return UNKNOWN


if __name__ == "__main__":
    PAGE.write_text(page())
