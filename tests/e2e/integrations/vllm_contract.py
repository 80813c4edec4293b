"""What vLLM calls of a connector, and what the connector needs of vLLM, read from source alone.

``python -m tests.e2e.integrations.vllm_contract`` downloads vLLM's wheel (about 340 MB). It records
the base class, and which of the connector's imports and of `INSIDE_VLLM` exist: `RECORDED`. Neither
vLLM nor the connector is imported.
"""

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvbus.integrations.vllm import INSIDE_VLLM

ROOT = Path(__file__).parents[3]
CONNECTOR = ROOT / "kvbus/integrations/vllm"
RECORDED = Path(__file__).with_suffix(".json")
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
BASE_CLASSES = ("KVConnectorBase_V1", "SupportsHMA")
OUR_CLASSES = ("SchedulerSide", "KvbusConnector")
"""The parts of the connector; a method of a later one hides that of an earlier one."""
KINDS = ("classmethod", "staticmethod", "property", "abstractmethod")

Methods = dict[str, dict[str, list[str]]]
"""By name, the ``parameters`` of each in order, and which of `KINDS` it is."""


def methods_of(source: str, *classes: str) -> Methods:
    return {
        one.name: {"parameters": _parameters(one), "kinds": _kinds(one)}
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for one in node.body
        if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")
    }


def imports_of(source: str, package: str = "vllm") -> Iterator[tuple[str, str]]:
    """Module and name of all that is imported from a package."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == package:
            for one in node.names:
                yield str(node.module), one.name


def imported() -> set[tuple[str, str]]:
    return {pair for source in sources() for pair in imports_of(source)}


def sources() -> list[str]:
    """The files of the connector, that of its class last."""
    paths = sorted(CONNECTOR.glob("*.py"), key=lambda one: one.stem == "connector")
    return [path.read_text() for path in paths]


def needed() -> Iterator[tuple[str, str, str]]:
    """Module, class and name of all that the connector uses inside vLLM."""
    for owner, names in INSIDE_VLLM.items():
        module, _, name = owner.partition(":")
        yield from ((module, name, one) for one in names.split())


def private_names() -> set[str]:
    """The private names of others that the connector uses; those of ``self`` that it has not."""
    nodes = [node for source in sources() for node in ast.walk(ast.parse(source))]
    known = {one.name for one in nodes if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    used = [one for one in nodes if isinstance(one, ast.Attribute) and one.attr.startswith("_")]
    known |= {one.attr for one in used if _of_self(one) and isinstance(one.ctx, ast.Store)}
    return {one.attr for one in used if not one.attr.startswith("__")} - known


def members_of(source: str, name: str) -> set[str]:
    """The methods and attributes of a class, and of its bases in the same source."""
    classes = {one.name: one for one in ast.parse(source).body if isinstance(one, ast.ClassDef)}
    found: set[str] = set()
    wanted = [name]
    while wanted:
        if (node := classes.pop(wanted.pop(), None)) is not None:
            wanted += [base.id for base in node.bases if isinstance(base, ast.Name)]
            inside = [one for one in ast.walk(node) if isinstance(one, ast.Attribute)]
            found |= {one.attr for one in inside if _of_self(one)} | set(_top_level(node.body))
    return found


def record(version: str, read: Callable[[str], str | None]) -> dict[str, Any]:
    """Record a vLLM; ``read`` returns the source of a file in it, None if there is no such file."""
    there = sorted(pair for pair in imported() if _has(read, *pair))
    return {
        "version": version,
        "methods": methods_of(read(BASE) or "", *BASE_CLASSES),
        "imports": [f"{module}:{name}" for module, name in there],
        "inside": [":".join(one) for one in needed() if _has_inside(read, *one)],
    }


def text_of(recorded: dict[str, Any]) -> str:
    methods = [f"{json.dumps(n)}: {json.dumps(one)}" for n, one in recorded["methods"].items()]
    imports = [json.dumps(one) for one in recorded["imports"]]
    version = json.dumps(recorded["version"])
    parts = [f'{{"version": {version},', '"methods": {', ",\n".join(methods), "},"]
    inside = [json.dumps(one) for one in recorded["inside"]]
    parts += ['"imports": [', ",\n".join(imports), "],", '"inside": [', ",\n".join(inside), "]}"]
    return "\n".join(parts) + "\n"


def differences(recorded: dict[str, Any]) -> list[str]:
    """Where the connector does not fit a vLLM that was recorded, a line for each."""
    ours: Methods = {}
    for source in sources():
        ours |= methods_of(source, *OUR_CLASSES)
    theirs: Methods = recorded["methods"]
    lines = [f"{name}: vLLM does not call it" for name in sorted(ours.keys() - theirs.keys())]
    for name, method in theirs.items():
        abstract = "abstractmethod" in method["kinds"]
        kinds = [kind for kind in method["kinds"] if kind != "abstractmethod"]
        if name not in ours:
            lines += [f"{name}: abstract, and the connector has none"] * abstract
        elif ours[name] != {"parameters": method["parameters"], "kinds": kinds}:
            lines.append(f"{name}: {ours[name]}, in vLLM {method}")
    lacking = {":".join(one) for one in imported()} - set(recorded["imports"])
    lacking |= {":".join(one) for one in needed()} - set(recorded["inside"])
    unknown = f"not in vLLM {recorded['version']}, or not written down: make vllm-contract"
    return lines + [f"{name}: {unknown}" for name in sorted(lacking)]


def _parameters(function: ast.FunctionDef) -> list[str]:
    given = function.args
    names = [one.arg for one in (*given.posonlyargs, *given.args)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    names += [f"{one.arg}=" for one in given.kwonlyargs]
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def _kinds(function: ast.FunctionDef) -> list[str]:
    names = [one.id for one in function.decorator_list if isinstance(one, ast.Name)]
    return sorted(name for name in names if name in KINDS)


def _has(read: Callable[[str], str | None], module: str, name: str) -> bool:
    """Whether the module defines the name, or has it from elsewhere, or is the folder of it."""
    path = module.replace(".", "/")
    if read(f"{path}/{name}.py") is not None:
        return True
    source = read(f"{path}.py") or read(f"{path}/__init__.py") or ""
    return name in set(_top_level(ast.parse(source).body))


def _has_inside(read: Callable[[str], str | None], module: str, owner: str, name: str) -> bool:
    path = module.replace(".", "/")
    source = read(f"{path}.py") or read(f"{path}/__init__.py") or ""
    return name in members_of(source, owner)


def _of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def _top_level(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                yield node.name
            case ast.ImportFrom() | ast.Import():
                yield from (one.asname or one.name for one in node.names)
            case ast.Assign(targets=targets):
                yield from (one.id for one in targets if isinstance(one, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name
            case ast.If(body=inner, orelse=other):
                yield from _top_level([*inner, *other])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--version", default="", help="of vLLM; default: the newest")
    parser.add_argument("--wheel", type=Path, help="one that is here already")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wanted = f"vllm=={options.version}" if options.version else "vllm"
        if options.wheel is None:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", folder]
            subprocess.run([*pip, "--only-binary", ":all:", wanted], check=True)
        (wheel,) = [options.wheel] if options.wheel else Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            names = set(files.namelist())
            found = record(
                wheel.name.split("-")[1],
                lambda name: files.read(name).decode() if name in names else None,
            )
    RECORDED.write_text(text_of(found))
    print(*differences(found) or ["the connector fits"], sep="\n")


if __name__ == "__main__":
    main()
