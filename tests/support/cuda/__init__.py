"""A fake CUDA driver for processes of tests; `driver/fake.h` says what it does.

A process that starts with `fake_cuda_env` finds it as libcuda.so.1, as does what it loads: NIXL and
UCX too. In a process that runs already, `load` puts it there for all that ask later, for good.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import numpy.typing as npt
import pytest

ROOT = Path(__file__).parents[3]
SOURCES = Path(__file__).with_name("driver")
CACHE = ROOT / ".pytest_cache" / "fake-cuda"
COPY_KERNELS = ROOT / "kvbus" / "memory" / "cuda" / "copy_lattice.cu"
LIBRARIES = "libcuda.so.1", "libnvidia-ml.so.1"
SHARED = "-std=c++17", "-fPIC", "-fvisibility=hidden"
OPTIONS = *SHARED, "-O1", "-falign-functions=16"
"""UCX replaces the first 16 bytes of functions, each of which must have them."""
OLD_SYMBOLS, VERSION_SCRIPT = SOURCES / "old_driver.map", "-Wl,--version-script="
OLD_VERSION = 12020
KERNEL_NAME = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\s*\(")


def uuid(gpu: int, *, mig: bool = False) -> str:
    return f"{'MIG' if mig else 'GPU'}-fa4ec0da-0000-4000-{'90' if mig else '80'}00-{gpu:012x}"


def fake_cuda_env(
    *,
    kernels: Sequence[Path] = (COPY_KERNELS,),
    world: "World | None" = None,
    old_driver: bool = False,
    env: Mapping[str, str] = os.environ,
    **settings: str | int,
) -> dict[str, str]:
    """``env`` for a process that is to see the fake driver.

    Kernels are CUDA C++, of which the driver runs a host build. Settings are the variables of the
    driver without their prefix: gpus, memory, context, mig, nvlinks, version, faults.
    """
    path = [str(libraries(old_driver=old_driver)), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    added = {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in settings.items()}
    if kernels:
        added["FAKE_CUDA_KERNELS"] = str(host_build(*kernels))
    if old_driver:
        added["FAKE_CUDA_VERSION"] = str(OLD_VERSION)
    if world is not None:
        added["FAKE_CUDA_WORLD"] = str(world.path)
    return {**env, "LD_LIBRARY_PATH": ":".join(path), **added}


def load(*, old_driver: bool = False) -> ctypes.CDLL:
    """The loader finds a library by the name it was linked with, once it is loaded by its path."""
    folder = libraries(old_driver=old_driver)
    loaded = [ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL) for name in LIBRARIES]
    return loaded[0]


def view(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Memory of a fake GPU in this process. Streams may still write it: synchronize first."""
    memory = (ctypes.c_ubyte * size_bytes).from_address(address)
    return np.frombuffer(memoryview(memory), np.uint8)


class World:
    """What processes with its environment share: memory in use, and faults planted at any time."""

    MAX_FAULT_BYTES = 4096
    COUNTED = ("kernels", "copies", "batches")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.touch()

    def num(self, what: str) -> int:
        """Kernels, copies or batches of copies that have run."""
        at = self.MAX_FAULT_BYTES + 8 * self.COUNTED.index(what)
        return int.from_bytes(self.path.read_bytes()[at : at + 8], "little")

    @contextmanager
    def faults(self, *faults: str) -> Iterator[None]:
        """Plant ``name``, ``name=value`` or ``name=value@pid``, in place of those before.

        sticky=CODE: the next call loses the context. slow=MS: each operation of a stream takes
        that long. no_handle, no_open=CODE: exporting or opening memory fails. no_range: imported
        memory has no address range. no_kernel, no_batch, no_peer, out_of_memory, init=CODE.
        """
        self._write(" ".join(faults))
        try:
            yield
        finally:
            self._write("")

    def _write(self, text: str) -> None:
        content = text.encode().ljust(self.MAX_FAULT_BYTES, b"\0")
        assert len(content) == self.MAX_FAULT_BYTES
        with self.path.open("r+b") as file:
            file.write(content)


@cache
def libraries(*, old_driver: bool = False) -> Path:
    """The folder of libcuda.so.1 and libnvidia-ml.so.1, built once for all processes.

    An old driver is CUDA 12.2: it has no batched copies, and refuses newer PTX.
    """
    folder = _built(_build_libraries, *sorted(SOURCES.iterdir()), salt=" ".join(OPTIONS))
    return folder / "old" if old_driver else folder


def _build_libraries(folder: Path) -> None:
    (folder / "old").mkdir()
    compiled = folder / "driver.o"
    _compile(*OPTIONS, "-r", *sorted(SOURCES.glob("[!n]*.cc")), "-o", compiled)
    for place, options in ((folder, []), (folder / "old", [f"{VERSION_SCRIPT}{OLD_SYMBOLS}"])):
        _link(place / "libcuda.so.1", compiled, *options)
        _link(place / "libnvidia-ml.so.1", *OPTIONS, SOURCES / "nvml.cc")


def _link(library: Path, *inputs: str | Path) -> None:
    name = f"-Wl,-soname,{library.name},-z,defs"
    _compile("-shared", name, *inputs, "-ldl", "-lpthread", "-o", library)


@cache
def host_build(*kernels: Path) -> Path:
    """A library with host builds of these sources, each access to memory checked."""
    expanded = [_compile("-E", "-P", "-x", "c++", path) for path in kernels]
    names = [name for text in expanded for name in KERNEL_NAME.findall(text)]
    lines = [f'#include "{SOURCES / "kernel_shim.h"}"']
    lines += [f'#include "{path.resolve()}"' for path in kernels]
    lines += [f"HOST_KERNEL_OF({name})" for name in names]
    content = "\n".join([*lines, ""])

    def build(folder: Path) -> None:
        source, compiled = folder / "kernels.cc", folder / "kernels.o"
        source.write_text(content)
        _compile(*SHARED, "-O2", "-fsanitize=thread", "-c", source, "-o", compiled)
        _compile("-shared", "-Wl,-z,defs", compiled, "-o", folder / "kernels.so")

    shims = SOURCES / "kernel_shim.h", SOURCES / "kernel_abi.h"
    return _built(build, *shims, *kernels, salt=content) / "kernels.so"


def _compile(*arguments: str | Path) -> str:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler here")
    command = [compiler, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
    return done.stdout


def _built(build: Callable[[Path], None], *inputs: Path, salt: str) -> Path:
    digest = hashlib.sha256(salt.encode())
    for path in inputs:
        digest.update(path.read_bytes())
    made = CACHE / digest.hexdigest()[:16]
    if not made.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                folder = Path(mkdtemp(dir=CACHE))
                try:
                    build(folder)
                    folder.rename(made)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
    return made
