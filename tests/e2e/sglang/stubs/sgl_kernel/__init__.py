"""Stands in for SGLang's kernels, of which no registry has a build for CPUs: names to import.

`torch.ops.sgl_kernel` stays empty, so SGLang sees no kernels and takes its code in torch.
"""

from collections.abc import Callable


def __getattr__(name: str) -> Callable[..., None]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_args: object, **_kwargs: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in")

    return absent
