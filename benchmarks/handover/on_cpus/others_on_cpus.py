"""What SGLang's own transfer backends need where there is no GPU, by its own plug-in point.

NIXL's takes the KV cache for GPU memory unless it is told, and Mooncake's copies numbers of pages
to pinned memory behind a CUDA event unless it takes them as the others do.
"""

# ruff: noqa: PLC0415  SGLang is imported in its own processes alone

from importlib.util import find_spec
from typing import Any

NIXL = "sglang.srt.disaggregation.nixl.conn.NixlKVManager"


def register() -> None:
    """Called by SGLang once in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{NIXL}.__init__", _host_memory, HookType.BEFORE)
    if find_spec("mooncake"):
        from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

        MooncakeKVSender.supports_host_tensor_indices = False


def _host_memory(manager: Any, args: Any, *rest: Any, **named: Any) -> Any:
    args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
    return (manager, args, *rest), named
