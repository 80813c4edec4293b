"""Description of an engine from vLLM's configuration alone, as the scheduler has no tensors."""

from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
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
from kvbus.geometry import DTYPE_SIZES_BYTES, EngineSpec, GroupSpec, KvPart, validate_engine

SERVED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec)
FLOAT8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Caches with one scale a tensor, which is a weight of the model: the cache has no other bytes."""
DRAFT_MODEL = "draft_model."
"""Prefix of its layers."""
HANDED_OFF = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


def describe_engine(
    vllm_config: Any, kv_cache_config: Any, *, engine_id: str, model: str | None = None
) -> EngineSpec:
    """Return the spec that every process registers, or raise `GeometryError`.

    Group i is transfer group i, and item i of `select_transfer_block_ids`.
    """
    _refuse_settings(vllm_config, kv_cache_config)
    for group in kv_cache_config.kv_cache_groups:
        _refuse_group(group)
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.transfer_groups
    named = zip(_group_names(groups, vllm_config), groups, strict=True)
    spec = EngineSpec(
        engine_id=engine_id,
        model=model or model_name(vllm_config.model_config),
        tp_size=parallel.tensor_parallel_size,
        groups=tuple(_describe_group(name, group, vllm_config) for name, group in named),
        pp_size=parallel.pipeline_parallel_size,
    )
    validate_engine(spec)
    return spec


def model_name(model_config: Any) -> str:
    """Return the name of weights, revision and quantisation, equal on both sides."""
    name = f"{model_config.model}@{model_config.revision or 'main'}"
    return f"{name}+{model_config.quantization}" if model_config.quantization else name


def cache_of(group: Any) -> Any:
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


def layer_number(name: str, vllm_config: Any) -> int:
    """Return a layer's number from the name of its attention.

    Layers of a draft model count behind those of the model, as EAGLE and MTP number theirs.
    """
    try:
        number = int(extract_layer_index(name))
    except (AssertionError, ValueError) as error:
        raise GeometryError(
            f"vLLM cannot be served by kvbus: layer '{name}' has no number, or several",
            field="layers",
        ) from error
    if name.startswith(DRAFT_MODEL):
        number += vllm_config.model_config.get_total_num_hidden_layers()
    return number


def tokens_left(vllm_config: Any, engine: EngineSpec) -> int:
    """Return how many of a prompt's last tokens prefill leaves to decode; see `_describe_group`."""
    has_windows = any(group.window is not None for group in engine.groups)
    num_lookahead: int = vllm_config.num_prefill_lookahead_tokens
    return max(int(has_windows), num_lookahead - 1)


def require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise GeometryError(f"vLLM cannot be served by kvbus: {message}", field=field)


def _refuse_settings(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        require(size == 1, name, f"{name} is {size}: kvbus serves no context parallelism, set 1")
    require(
        not is_quantized_kv_cache(cache.cache_dtype) or cache.cache_dtype in FLOAT8,
        "kv_cache_dtype",
        f"the KV cache is quantised as {cache.cache_dtype}: kvbus hands off fp8 with one scale a "
        "tensor. Start vLLM with --kv-cache-dtype fp8, fp8_e5m2 or auto",
    )
    speculative = vllm_config.speculative_config
    require(
        speculative is None or not speculative.uses_extract_hidden_states(),
        "speculative_config",
        "vLLM caches hidden states beside the KV (extract_hidden_states): not served",
    )
    require(
        not vllm_config.model_config.is_encoder_decoder,
        "model",
        "encoder-decoder models are not served: their cross attention caches the encoder's states",
    )
    require(
        speculative is None
        or not speculative.uses_draft_kv_cache()
        or parallel.pipeline_parallel_size == 1,
        "pipeline_parallel_size",
        "draft layers are on the last pipeline stage alone, where other processes of vLLM do not "
        "see them. Set it to 1, or use a method without a draft model (ngram)",
    )
    num_groups = len(kv_cache_config.transfer_groups)
    require(num_groups > 0, "groups", "the model has no KV cache")
    require(
        num_groups == 1 or parallel.pipeline_parallel_size == 1,
        "pipeline_parallel_size",
        "a model with several kinds of attention is not served in pipeline stages: no process of "
        "vLLM knows which layers the groups of the other stages have. Set it to 1",
    )


def _refuse_group(group: Any) -> None:
    cache = cache_of(group)
    kind = type(cache).__name__
    where = f"the group of {', '.join(group.layer_names[:2])} ..."
    plain = not group.host_resident and group.role is KVCacheGroupRole.DEFAULT
    require(plain and group.enable_kv_transfer, "groups", f"{where} is of HiSparse: not served")
    require(
        type(cache) in SERVED,
        "groups",
        f"{where} is a {kind}: kvbus serves full attention, sliding windows and MLA",
    )
    require(
        cache.kv_quant_mode in HANDED_OFF,
        "kv_cache_dtype",
        f"{where} is quantised as {cache.kv_quant_mode.name}: use --kv-cache-dtype fp8 or auto",
    )
    require(cache.tokens_per_state == 1, "groups", f"{where} compresses tokens: not served")
    require(
        isinstance(cache, MLAAttentionSpec) or cache.head_size_v == cache.head_size,
        "head_size_v",
        f"{where} has K heads of {cache.head_size} and V heads of {cache.head_size_v} elements: "
        "kvbus needs one size for both",
    )
    if isinstance(cache, SlidingWindowSpec):
        require(cache.sliding_window > 1, "sliding_window", f"{where} has a window of one token")


def _group_names(groups: Any, vllm_config: Any) -> list[str]:
    """Return names that are equal in two vLLMs, such as "full" or "window-4096".

    Several groups of a kind are numbered by their first layers.
    """
    kinds = [_kind(cache_of(group)) for group in groups]
    firsts = [
        (min(layer_number(name, vllm_config) for name in one.layer_names), at)
        for at, one in enumerate(groups)
    ]
    names = []
    for kind, first in zip(kinds, firsts, strict=True):
        alike = sorted(one for one, other in zip(firsts, kinds, strict=True) if other == kind)
        names.append(kind if len(alike) == 1 else f"{kind}.{alike.index(first)}")
    return names


def _kind(cache: Any) -> str:
    if isinstance(cache, SlidingWindowSpec):
        return f"window-{cache.sliding_window}"
    return "latent" if isinstance(cache, MLAAttentionSpec) else "full"


# A token attends to `sliding_window` tokens, including itself. So after N tokens, the next one
# needs the last `sliding_window - 1`. vLLM's cache manager keeps just these once N tokens are
# computed. The block of the token before them may be freed on one side, and never allocated on the
# other. Token N - 1 would need that token, too, if it were computed again. So prefill hands off all
# but the last token of a prompt, which decode computes anyway. Draft modules look further ahead:
# vLLM keeps `extra_retained_tokens` more for them, and prefill leaves as many more to decode.
def _describe_group(name: str, group: Any, vllm_config: Any) -> GroupSpec:
    cache = cache_of(group)
    dtype = str(cache.dtype).removeprefix("torch.")
    if cache.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR:  # torch may call it uint8
        dtype = FLOAT8[vllm_config.cache_config.cache_dtype]
    require(dtype in DTYPE_SIZES_BYTES, "kv_cache_dtype", f"a KV cache of {dtype} is not served")
    latent = isinstance(cache, MLAAttentionSpec)
    return GroupSpec(
        name=name,
        layers=_all_layers(group, vllm_config),
        block_size=cache.block_size,
        num_kv_heads=1 if latent else _num_kv_heads(cache, vllm_config),
        head_dim=cache.head_size,
        dtype=dtype,
        parts=(KvPart.LATENT,) if latent else (KvPart.KEY, KvPart.VALUE),
        window=_window(cache) if isinstance(cache, SlidingWindowSpec) else None,
    )


def _window(cache: SlidingWindowSpec) -> int:
    window: int = cache.sliding_window - 1 + cache.extra_retained_tokens
    return window


def _all_layers(group: Any, vllm_config: Any) -> tuple[int, ...]:
    """Return the layers of all pipeline stages; a process knows only its stage's."""
    numbers = tuple(sorted(layer_number(name, vllm_config) for name in group.layer_names))
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return numbers
    layers = tuple(range(vllm_config.model_config.get_total_num_hidden_layers()))
    require(
        set(numbers) <= set(layers), "layers", f"layers {numbers} of {len(layers)} in the model"
    )
    return layers


def _num_kv_heads(cache: Any, vllm_config: Any) -> int:
    """Count the KV heads of all ranks once. A rank's single head may be a replica."""
    tp_size: int = vllm_config.parallel_config.tensor_parallel_size
    on_each_rank: int = cache.num_kv_heads
    if on_each_rank > 1 or tp_size == 1:
        return on_each_rank * tp_size
    total: int = vllm_config.model_config.get_total_num_kv_heads()
    require(
        total <= tp_size and tp_size % total == 0,
        "num_kv_heads",
        f"a layer has one KV head on each of {tp_size} ranks, the model says {total} in all: "
        "layers that differ in KV heads are not served at this tensor parallel size",
    )
    return total
