"""Compile the copy kernel to PTX, which every later GPU and driver accepts.

    pip install nvidia-cuda-nvrtc-cu12==12.0.140
    python -m tests.tools.make_ptx

NVRTC 12.0 makes PTX 8.0: drivers from 525 on load it, for GPUs from Volta (sm_70) on.
"""

import ctypes
import hashlib
import sys
from importlib.metadata import files
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "kvbus" / "memory" / "cuda"
SOURCE, PTX = FOLDER / "copy_lattice.cu", FOLDER / "copy_lattice.ptx"
OPTIONS = (b"--gpu-architecture=compute_70", b"--std=c++14")
PACKAGE = "nvidia-cuda-nvrtc-cu12"


def digest() -> str:
    return hashlib.sha256(SOURCE.read_bytes()).hexdigest()


def first_line() -> str:
    return f"// Made from copy_lattice.cu with SHA-256 {digest()}\n"


def compile_source() -> str:
    """Raises `SystemExit` with the compiler's log."""
    (library,) = (one for one in files(PACKAGE) or () if one.name == "libnvrtc.so.12")
    nvrtc = ctypes.CDLL(str(library.locate()))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = SOURCE.read_bytes()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    failed = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    what = "ProgramLog" if failed else "PTX"
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    if failed:
        sys.exit(text.value.decode())
    return text.value.decode()


if __name__ == "__main__":
    PTX.write_text(first_line() + compile_source())
    print(PTX)
