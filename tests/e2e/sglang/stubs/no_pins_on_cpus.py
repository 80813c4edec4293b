"""Lets SGLang load LoRA adapters on CPUs, by its own plug-in point.

SGLang asks torch for pinned memory, which only a machine with an accelerator has. Only servers with
`VARIABLE` have this.
"""

import os
from collections.abc import Callable
from typing import Any

VARIABLE = "NO_PINS_ON_CPUS"
MAKERS = ("tensor", "empty", "zeros", "ones", "full", "arange")


def register() -> None:
    """Called by SGLang once in each of its processes."""
    if VARIABLE not in os.environ:
        return
    import torch

    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010 - for mypy
    for name in MAKERS:
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*given: Any, **named: Any) -> Any:
        named.pop("pin_memory", None)
        return make(*given, **named)

    return made
