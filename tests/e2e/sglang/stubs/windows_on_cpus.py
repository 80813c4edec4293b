"""Mends SGLang's attention on CPUs for models with sliding windows, by its own plug-in point.

`torch_native` writes a window's KV where its own pool has it, and reads it at the slots of the
other layers' pool: right only as long as both pools give out the same numbers. All servers of the
tests have this, so that what SGLang says alone is right, too.
"""

from typing import Any

BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def register() -> None:
    """Called by SGLang once in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for step in ("extend", "decode"):
        HookRegistry.register(f"{BACKEND}._run_sdpa_forward_{step}", _attend, HookType.AROUND)


def _attend(original: Any, backend: Any, *given: Any, **named: Any) -> Any:
    _query, _output, keys, _values, slots, *_ = given
    pool = backend.token_to_kv_pool
    if backend.use_sliding_window_kv_pool and any(
        keys.data_ptr() == buffer.data_ptr() for buffer in pool.swa_kv_pool.k_buffer
    ):
        slots = pool.translate_loc_from_full_to_swa(slots)
    return original(backend, *given[:4], slots, *given[5:], **named)
