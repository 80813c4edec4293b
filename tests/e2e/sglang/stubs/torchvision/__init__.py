"""Stands in for torchvision, whose wheels need a torch for CUDA: names, and nothing to call."""

import enum
import sys
import types

__version__ = "0.28.0"


class InterpolationMode(enum.Enum):
    """How pictures are scaled."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def _absent(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


for _path in (
    *("io", "ops", "transforms", "transforms.functional"),
    *("transforms.v2", "transforms.v2.functional"),
):
    _module = types.ModuleType(f"torchvision.{_path}")
    vars(_module).update(__path__=[], InterpolationMode=InterpolationMode, __getattr__=_absent)
    sys.modules[_module.__name__] = _module
    _parent, _, _leaf = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _leaf, _module)
