"""Writes what each engine hands off and refuses into docs/engines.md: ``docs/generate_kinds.py``.

Tests name what they show with the mark ``kind``. Refusals are the calls of `require` and `_refuse`
in the integrations. Neither vLLM nor SGLang is imported.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines.md"
BEGIN, END = "<!-- Written by `docs/generate_kinds.py`. -->", "<!-- End of it. -->"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
LEVELS = {
    "servers": "servers: same tokens as one server alone",
    "scheduler": "the engine's scheduler, without a model",
    "memory": "the engine's memory and configuration, without a model",
}
REFUSE = {"require": 2, "_refuse": 1}
"""Functions that refuse, and the number of the argument that says what."""


def table() -> str:
    """The generated part of docs/engines.md."""
    shown = [
        f"| {name} | {ENGINES[engine]} | {LEVELS[on]} |"
        for engine in ENGINES
        for level in LEVELS
        for on, name in sorted(marks(ROOT / "tests" / "e2e" / engine))
        if on == level
    ]
    lines = ["| handed off | by | tested with |", "| --- | --- | --- |", *shown, ""]
    lines += ["### Refused at startup", "", "The error names the reason and what helps.", ""]
    for engine, title in ENGINES.items():
        folder = ROOT / "kvbus" / "integrations" / engine
        texts = dict.fromkeys(
            text for path in sorted(folder.glob("*.py")) for text in refusals(path)
        )
        lines += [f"- {title}: {text}" for text in texts]
    return "\n".join([BEGIN, "", *lines, "", END])


def page() -> str:
    """The whole of docs/engines.md."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + table() + after


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
    """What each refusal says; values that are known at run time are "…"."""
    tree = ast.parse(path.read_text())
    shared = _constants(tree.body)
    for function in (one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)):
        known = {**shared, **_constants([*ast.walk(function)])}
        for call in (one for one in ast.walk(function) if isinstance(one, ast.Call)):
            if (name := ast.unparse(call.func)) in REFUSE and len(call.args) > REFUSE[name]:
                texts = [_text(one, known) for one in call.args[REFUSE[name] :]]
                if texts[0].strip("… "):
                    yield ": ".join(text for text in texts if text).replace("… ...", "…")


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
    return "…"


if __name__ == "__main__":
    PAGE.write_text(page())
