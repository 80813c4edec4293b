"""What of a vLLM configuration kvbus cannot serve, said once at start-up.

Refuses by `GeometryError` with what is not served and what to do; detail ``field`` names the
setting or the kind of cache.
"""

from typing import Any

from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupRole,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    is_quantized_kv_cache,
)

from kvbus.errors import GeometryError

SERVED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)


def refuse_unserved(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `GeometryError` for settings and groups whose KV kvbus cannot describe."""
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        require(size == 1, name, f"{name} is {size}: kvbus serves no context parallelism, set 1")
    require(
        not is_quantized_kv_cache(cache.cache_dtype),
        "kv_cache_dtype",
        f"the KV cache is quantised ({cache.cache_dtype}): start vLLM with --kv-cache-dtype auto",
    )
    speculative = vllm_config.speculative_config
    require(
        speculative is None or not speculative.uses_draft_kv_cache(),
        "speculative_config",
        "the draft layers of speculative decoding have KV of their own, which kvbus does not move: "
        "start vLLM without, or with a method that needs no draft model (ngram)",
    )
    require(
        not vllm_config.model_config.is_encoder_decoder,
        "model",
        "encoder-decoder models are not served: their cross attention caches the encoder's states",
    )
    require(len(kv_cache_config.transfer_groups) > 0, "groups", "the model has no KV cache")
    for group in kv_cache_config.kv_cache_groups:
        _refuse_group(group)
    several = len(kv_cache_config.transfer_groups) > 1
    require(
        not (several and parallel.pipeline_parallel_size > 1),
        "pipeline_parallel_size",
        "a model with several kinds of attention is not served in pipeline stages: no process of "
        "vLLM knows which layers the groups of the other stages have. Set it to 1",
    )


def cache_of(group: Any) -> Any:
    """What each layer of vLLM's ``group`` caches; raises `GeometryError` when layers differ."""
    if not isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
        return group.kv_cache_spec
    first, *others = group.kv_cache_spec.kv_cache_specs.values()
    same = ("num_kv_heads", "head_size", "head_size_v", "dtype", "block_size")
    for name in same if type(first) in SERVED else ():
        require(
            all(getattr(one, name, None) == getattr(first, name) for one in others),
            name,
            f"layers of one group differ in {name}, kvbus needs groups of equal layers: "
            f"{', '.join(group.layer_names[:3])} ...",
        )
    return first


def _refuse_group(group: Any) -> None:
    cache = cache_of(group)
    kind = type(cache).__name__
    where = f"the group of {', '.join(group.layer_names[:2])} ..."
    plain = not group.host_resident and group.role is KVCacheGroupRole.DEFAULT
    require(plain and group.enable_kv_transfer, "groups", f"{where} is of HiSparse: not served")
    require(
        not group.is_eagle_group,
        "groups",
        f"{where} has draft layers of speculative decoding: start vLLM without",
    )
    require(
        type(cache) in SERVED,
        "groups",
        f"{where} is a {kind}: kvbus serves full attention, sliding windows and MLA",
    )
    require(
        cache.kv_quant_mode is KVQuantMode.NONE,
        "kv_cache_dtype",
        f"{where} is quantised ({cache.kv_quant_mode.name}): use --kv-cache-dtype auto",
    )
    require(cache.tokens_per_state == 1, "groups", f"{where} compresses tokens: not served")
    latent = isinstance(cache, MLAAttentionSpec)
    require(
        latent or cache.head_size_v == cache.head_size,
        "head_size_v",
        f"{where} has K heads of {cache.head_size} and V heads of {cache.head_size_v} elements: "
        "kvbus needs one size for both",
    )
    if isinstance(cache, SlidingWindowSpec):
        require(cache.sliding_window > 1, "sliding_window", f"{where} has a window of one token")
        require(
            cache.extra_retained_tokens == 0,
            "sliding_window",
            f"{where} keeps tokens for draft modules: start vLLM without speculative decoding",
        )


def require(condition: bool, field: str, message: str) -> None:
    """Raise `GeometryError` with ``message``, unless ``condition``."""
    if not condition:
        raise GeometryError(f"vLLM cannot be served by kvbus: {message}", field=field)
