"""A second backend of NIXL that can read memory: UCX, under another name.

NIXL's wheel has other backends for networks, and their libraries are seldom installed.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

TWIN, BROKEN = "TWIN", "BROKEN"
BINDINGS = "from kvbus.data import nixl_agent; print(nixl_agent._bindings.__file__)"


@cache
def _package() -> Path:
    """The package of the CUDA version that NIXL chooses here."""
    found = subprocess.check_output([sys.executable, "-c", BINDINGS], text=True)
    return Path(found.strip()).parent


def plugin_environment(folder: Path) -> dict[str, str]:
    """Link NIXL's libraries into ``folder``, with a plugin `TWIN`, and one that cannot be loaded.

    Plugins find the other libraries by their own place, so the whole tree is linked.
    """
    package = _package()
    for libraries in package.parent.glob(f"*{package.name}*.libs"):
        shutil.copytree(libraries, folder / libraries.name, copy_function=os.symlink)
    plugins = sorted(folder.rglob("libplugin_UCX.so"))[0].parent
    (plugins / f"libplugin_{TWIN}.so").symlink_to((plugins / "libplugin_UCX.so").readlink())
    (plugins / f"libplugin_{BROKEN}.so").write_text("no library")
    return {"NIXL_PLUGIN_DIR": str(plugins)}
