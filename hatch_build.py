"""Compiles the kernel that copies when kvbus is built or installed.

A wheel gets one from a temporary folder, and nothing is written beside the sources; an editable
install needs it there, where ``python hatch_build.py`` compiles it, too. Without a compiler the
build goes on: kvbus then copies by numpy, which is slower.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent
FOLDER = ROOT / "kvbus" / "memory"
SOURCE, LIBRARY = FOLDER / "copy_runs.c", FOLDER / "copy_runs.so"


def compile_kernel(library: Path = LIBRARY) -> str | None:
    """Compile by ``CC`` (default: cc). Returns why not, if there is none: not an old one either."""
    compiler = shlex.split(os.environ.get("CC") or "cc")
    new = library.with_suffix(f".{os.getpid()}")
    command = [*compiler, "-O2", "-std=c99", "-shared", "-fPIC", "-o", str(new), str(SOURCE)]
    library.unlink(missing_ok=True)
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{shlex.join(command)} failed: {done.stderr.strip()}"
        new.replace(library)
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    finally:
        new.unlink(missing_ok=True)
    return None


def add_kernel(version: str, build_data: dict[str, Any], folder: Path) -> str | None:
    """Put the kernel into a wheel, which is then one of this platform; returns why not, if so.

    It is compiled in ``folder`` unless the ``version`` of the wheel is "editable".
    """
    is_editable = version == "editable"
    library = LIBRARY if is_editable else folder / LIBRARY.name
    problem = compile_kernel(library)
    if problem is None:
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        if not is_editable:
            place = LIBRARY.relative_to(Path(__file__).parent)
            build_data["force_include"][str(library)] = str(place)
    return problem


def add_protocol(build_data: dict[str, Any]) -> None:
    """Add what authors of engines in other languages need. An image is built without it."""
    vectors = (ROOT / "tests" / "unit" / "vectors").glob("*.json")
    folders = dict.fromkeys(vectors, "vectors")
    for name in ("docs/protocol.schema.json", "examples/c/protocol.h"):
        folders[ROOT / name] = ""
    for source, folder in folders.items():
        if source.exists():
            target = Path("kvbus", "protocol", folder, source.name)
            build_data["force_include"][str(source)] = str(target)


def told(problem: str) -> str:
    """Return the warning for a user."""
    return (
        "kvbus is built without its copy kernel, so copies on one machine are slower: install a C "
        f"compiler, or name one in CC, and install kvbus again ({problem})"
    )


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand, or imported, where nothing is built
    pass
else:

    class KernelHook(BuildHookInterface[Any]):
        """Runs before each wheel, editable ones included."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Put the kernel into the wheel; a published one has files of the protocol, too."""
            self._folder = tempfile.TemporaryDirectory(prefix="kvbus-build-")
            problem = add_kernel(version, build_data, Path(self._folder.name))
            if version != "editable":
                add_protocol(build_data)
            if problem is not None:
                self.app.display_warning(told(problem))

        def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
            """The wheel has the kernel now."""
            self._folder.cleanup()


if __name__ == "__main__":
    failed = compile_kernel()
    sys.exit(told(failed) if failed else 0)
