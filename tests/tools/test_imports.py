"""Imports point one way, foreign packages have one room each, and pure rooms stay pure.

The table below is the rule. A room may import the rooms that it names, and itself.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PURE = ("errors", "geometry")
PLANNED = (*PURE, "planning", "protocol", "table")
PLUMBING = (*PLANNED, "bus", "memory", "data")

COMMANDS = ("lab", "text", "options", "output", "console", "progress")

ROOMS = {
    "kvbus/errors": (),
    "kvbus/text": (),
    "kvbus/histograms": (),
    "kvbus/clocks": (),
    "kvbus/interrupt": (),
    "kvbus/output": ("text",),
    "kvbus/console": ("output", "text"),
    "kvbus/options": (),
    "kvbus/variables": (),
    "kvbus/geometry": ("errors",),
    "kvbus/spawn": ("errors", "variables"),
    "kvbus/spec_text": PURE,
    "kvbus/planning": (*PURE, "spec_text", "text", "options", "output", "console"),
    "kvbus/protocol": PURE,
    "kvbus/fair": ("errors",),
    "kvbus/threads": (),
    "kvbus/table": (*PURE, "protocol"),
    "kvbus/bus": ("errors", "fair", "protocol"),
    "kvbus/memory": PLANNED,
    "kvbus/data": (*PURE, "planning", "fair", "memory", "threads"),
    "kvbus/keys": (*PURE, "protocol", "bus", "options", "output", "console", "variables"),
    "kvbus/agent": (*PLUMBING, "keys", "spawn", "text", "threads", "variables"),
    "kvbus/engine": (*PLANNED, "bus", "memory"),
    "kvbus/integrations": (
        *(*PURE, "protocol", "engine", "options", "output", "spawn", "text", "variables"),
    ),
    "kvbus/demo": (*PLUMBING, *COMMANDS, "keys", "engine", "spawn", "spec_text", "histograms"),
    "kvbus/bench": (*(*PLUMBING, *COMMANDS, "engine", "spawn", "spec_text", "histograms"),),
    "kvbus/lab": (
        *(*PLUMBING, *COMMANDS, "keys", "agent", "engine", "spawn", "spec_text"),
        *("histograms", "clocks"),
    ),
    "kvbus/trace": (*PURE, "protocol", "bus", "keys", "clocks", "output", "text", "console"),
    "kvbus/conform": (
        *(*PURE, "protocol", "options", "output", "progress", "spawn", "text", "variables"),
    ),
    "kvbus/progress": ("console", "output"),
    "kvbus/doctor": (*PLUMBING, *COMMANDS, "keys", "agent", "clocks"),
    "services/prefill/kvbus_prefill": (*PLUMBING, "agent", "fair", "keys", "interrupt"),
    "services/decode/kvbus_decode": (*PLUMBING, "agent", "fair", "keys", "interrupt"),
}

PURE_ROOMS = """
kvbus/errors kvbus/text kvbus/histograms kvbus/spec_text kvbus/geometry kvbus/fair kvbus/planning
kvbus/protocol kvbus/table kvbus/doctor/finding kvbus/clocks kvbus/trace/timeline
services/prefill/kvbus_prefill/offer services/prefill/kvbus_prefill/slot_table
services/decode/kvbus_decode/fetch services/decode/kvbus_decode/read_table
"""
PUBLIC = """
kvbus kvbus.bus kvbus.cli kvbus.clocks kvbus.console kvbus.errors kvbus.fair kvbus.geometry
kvbus.planning kvbus.progress kvbus.protocol kvbus.spawn kvbus.spec_text kvbus.text
kvbus.agent.access kvbus.agent.config kvbus.agent.data_plane kvbus.agent.local_engine
kvbus.agent.probe kvbus.agent.runtime kvbus.agent.service
kvbus.data.channel kvbus.data.child kvbus.data.client kvbus.data.loop kvbus.data.messages
kvbus.data.nixl kvbus.data.server
kvbus.engine kvbus.engine.bounce kvbus.engine.offers kvbus.engine.rank_memory
kvbus.integrations.ray kvbus.integrations.vllm.params
kvbus.keys.files kvbus.keys.trusted kvbus.lab.lab_engine
kvbus.memory.attach kvbus.memory.bus_errors kvbus.memory.cuda kvbus.memory.libc
kvbus.memory.mapping kvbus.memory.segment kvbus.table.events kvbus.table.table
kvbus_prefill.config kvbus_prefill.offer.table kvbus_prefill.prefill_service
kvbus_prefill.slot_table
kvbus_decode.config kvbus_decode.decode_service kvbus_decode.fetch.entry kvbus_decode.fetch.events
kvbus_decode.fetch.table kvbus_decode.holds kvbus_decode.read_table
kvbus_decode.remote_agent
"""
"""Modules that any test may import. It may import all of the room that it is named after."""
MOST_PRIVATE = 12
SIMULATED_LOOP = Path("tests/sim/world.py")
"""It steps asyncio's event loop from outside, by attributes of asyncio's."""
IMPURE = {"zmq", "nixl", "torch", "asyncio", "anyio", "time", "random", "structlog", "socket"}

OWNERS = {
    "zmq": ("kvbus/bus/", "kvbus/conform/"),
    "nixl": ("kvbus/data/nixl_agent.py",),
    "torch": (
        *("kvbus/memory/", "kvbus/engine/", "kvbus/demo/", "kvbus/bench/", "kvbus/lab/"),
        *("kvbus/integrations/vllm/", "kvbus/integrations/sglang/"),
    ),
    "vllm": ("kvbus/integrations/vllm/",),
    "sglang": ("kvbus/integrations/sglang/",),
    "starlette": ("kvbus/integrations/proxy.py",),
    "httpx": ("kvbus/integrations/proxy.py",),
    "uvicorn": ("kvbus/integrations/proxy.py",),
    "opentelemetry": ("kvbus/agent/otlp.py",),
    "pickle": (),
}


def test_each_room_imports_only_the_rooms_below_it() -> None:
    broken = [
        f"{path}: imports kvbus.{target}"
        for room, allowed in ROOMS.items()
        for path in _sources(room)
        for target in _kvbus_rooms(path)
        if target not in (*allowed, room.rsplit("/", maxsplit=1)[-1])
    ]

    assert not broken, "\n".join(broken)


def test_services_do_not_import_each_other() -> None:
    broken = [
        str(path)
        for side, other in (("prefill", "kvbus_decode"), ("decode", "kvbus_prefill"))
        for path in _sources(f"services/{side}")
        if any(module.split(".")[0] == other for module in _imports(path))
    ]

    assert not broken


def test_pure_code_imports_nothing_that_has_effects() -> None:
    pure = [path for room in PURE_ROOMS.split() for path in _sources(room)]
    broken = [
        f"{path}: imports {module}"
        for path in pure
        for module in _imports(path)
        if module.split(".")[0] in IMPURE
    ]

    assert not broken, "\n".join(broken)


@pytest.mark.parametrize("package", sorted(OWNERS))
def test_a_foreign_package_is_imported_in_its_own_room_only(package: str) -> None:
    broken = [
        str(path)
        for folder in ("kvbus", "services")
        for path in _sources(folder)
        if not str(path.relative_to(ROOT)).startswith(OWNERS[package] or "\0")
        and any(module.split(".")[0] == package for module in _imports(path))
    ]

    assert not broken, f"{package} is imported by {broken}"


def test_every_room_is_in_the_table() -> None:
    folders = [path.parent for path in (ROOT / "kvbus").glob("*/__init__.py")]

    assert {f"kvbus/{folder.name}" for folder in folders} <= ROOMS.keys()


def test_tests_import_public_modules_and_those_of_their_room() -> None:
    """A file of a room may be split, or go, and no test of another room moves."""
    product = {_module(path) for folder in ("kvbus", "services") for path in _sources(folder)}
    broken = [
        f"{path.relative_to(ROOT)}: imports {module}"
        for path in _sources("tests")
        for module in _used(path, product)
        if module not in PUBLIC.split() and not _rooms_of(module) & _tested_by(path)
    ]

    assert not broken, "\n".join(broken)
    assert product >= set(PUBLIC.split())


def _rooms_of(module: str) -> set[str]:
    """The packages of a module, and its own name; those of services without their prefix."""
    return {part.removeprefix("kvbus_") for part in module.split(".")} - {"kvbus"}


def _tested_by(path: Path) -> set[str]:
    """The folders of a test, and what its file is called after."""
    _, *folders = path.relative_to(ROOT).with_suffix("").parts
    return {part for name in folders for part in (name, *name.removeprefix("test_").split("_and_"))}


def test_tests_read_few_private_attributes() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.attr}"
        for path in _sources("tests")
        if path.relative_to(ROOT) != SIMULATED_LOOP
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and _is_private(node)
    ]

    assert len(found) <= MOST_PRIVATE, "\n".join(found)


def _is_private(node: ast.Attribute) -> bool:
    is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
    return node.attr.startswith("_") and not node.attr.startswith("__") and not is_own


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[2:] if parts[0] == "services" else parts
    return ".".join(parts).removesuffix(".__init__")


def _used(path: Path, modules: Set[str]) -> Iterator[str]:
    """Of these modules the ones that a file imports, whole or names of them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            outer = str(node.module)
            inner = (f"{outer}.{alias.name}" for alias in node.names)
            yield from (one if one in modules else outer for one in inner if outer in modules)


def _sources(room: str) -> list[Path]:
    folder = ROOT / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def _kvbus_rooms(path: Path) -> Iterator[str]:
    for module in _imports(path):
        parts = module.split(".")
        if parts[0] == "kvbus" and len(parts) > 1:
            yield parts[1]


@cache
def _imports(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"kvbus.{alias.name}" for alias in node.names]
            found += names if node.module == "kvbus" else [node.module]
    return found


def test_engines_import_nothing_only_agents_or_commands_need() -> None:
    """So the SDK works where these are not installed, as docs/engines.md says."""
    unwanted = "nixl typer prometheus_client packaging psutil xxhash starlette httpx opentelemetry"
    code = f"""
import sys
for name in "{unwanted}".split():
    sys.modules[name] = None
import kvbus.engine, kvbus.engine.bounce
"""
    subprocess.run([sys.executable, "-c", code], check=True)
