"""Description of an engine: what vLLM's configuration and the tensors of its workers say.

Workers describe it, as the scheduler sees neither tensors nor the layers of each stage. It gets
their description with the handshake metadata. Refusals by the configuration come at start.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupRole,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    is_quantized_kv_cache,
    iter_layer_specs,
)

from kvbus.errors import GeometryError
from kvbus.geometry import DTYPE_SIZES_BYTES, EngineSpec, GroupSpec, KvPart, validate_engine
from kvbus.integrations.vllm.params import Description, GroupSource, require
from kvbus.integrations.vllm.states import refuse_state, state_of

SERVED = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, MambaSpec)
FLOAT8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Caches with one scale a tensor, which is a weight of the model: the cache has no other bytes."""
DRAFT_MODEL, MTP = "draft_model", "mtp"
"""Components of the names of draft layers; vLLM may number these layers from 0."""
INDEXER = "indexer"
OTHER_DTYPE = "Use --kv-cache-dtype fp8, fp8_e5m2 or auto"
HANDED_OFF = (KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR)


Layers = list[tuple[GroupSource, GroupSpec]]
"""Each layer as a group of its own; its name is its kind, such as "window-4096"."""
Gather = Callable[[Layers, str], Layers]
"""Joins the layers of all pipeline stages; the text is the problem of this stage, if any."""


def describe_engine(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    engine_id: str,
    model: str | None = None,
    kv_caches: Mapping[str, Any] | None = None,
    gather: Gather | None = None,
) -> Description:
    """Describe the engine from its configuration, and in a worker from its tensors.

    Raises `GeometryError`; with ``gather``, this is the problem of any stage.
    """
    refuse_unserved(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    found = _layers(vllm_config, kv_cache_config, kv_caches or {})
    layers = _gathered(found, gather) if gather is not None else [*found]
    merged: dict[tuple[GroupSource, GroupSpec], list[int]] = {}
    for source, one in layers:
        merged.setdefault((source, replace(one, layers=(0,))), []).append(one.layers[0])
    sources, groups = [], []
    for (source, one), numbers in merged.items():
        sources.append(source)
        groups.append(replace(one, layers=tuple(sorted(numbers))))
    spec = EngineSpec(
        engine_id=engine_id,
        model=model or model_name(vllm_config.model_config),
        tp_size=parallel.tensor_parallel_size,
        groups=_numbered(groups),
        pp_size=parallel.pipeline_parallel_size,
    )
    validate_engine(spec)
    return Description(spec, tuple(sources))


def joined(stages: Iterable[tuple[Layers, str]]) -> Layers:
    """Return the layers of ``stages``; raise `GeometryError` for the problem of one."""
    layers: Layers = []
    for found, problem in stages:
        if problem:
            raise GeometryError(problem, field="layers")
        layers += found
    return layers


def _gathered(found: Iterable[tuple[GroupSource, GroupSpec]], gather: Gather) -> Layers:
    """Other stages wait for this one, also if its layers are refused."""
    layers: Layers = []
    try:
        layers += found
    except GeometryError as error:
        return gather([], error.message)
    return gather(layers, "")


def model_name(model_config: Any) -> str:
    """Return the name of weights, revision and quantisation, equal on both sides."""
    name = f"{model_config.model}@{model_config.revision or 'main'}"
    return f"{name}+{model_config.quantization}" if model_config.quantization else name


def caches_of(group: Any) -> dict[str, Any]:
    """Return what each layer of vLLM's group caches, by its name."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return {name: spec.kv_cache_specs[name] for name in group.layer_names}
    return dict.fromkeys(group.layer_names, spec)


def layer_number(name: str, vllm_config: Any) -> int:
    """Return a layer's number from the name of its attention.

    Layers of a draft model count behind those of the model, as EAGLE and most MTP number theirs.
    """
    try:
        number = int(extract_layer_index(name))
    except (AssertionError, ValueError) as error:
        raise GeometryError(
            f"vLLM cannot be served by kvbus: layer '{name}' has no number, or several",
            field="layers",
        ) from error
    num_layers: int = vllm_config.model_config.get_total_num_hidden_layers()
    components = name.split(".")
    is_behind = components[0] == DRAFT_MODEL or (MTP in components and number < num_layers)
    return number + num_layers if is_behind else number


def tokens_left(vllm_config: Any, kv_cache_config: Any) -> int:
    """Return how many of a prompt's last tokens prefill leaves to decode; see `_window`."""
    leaves_one = _has(SlidingWindowSpec, kv_cache_config) or has_states(kv_cache_config)
    num_lookahead: int = vllm_config.num_prefill_lookahead_tokens
    return max(int(leaves_one), num_lookahead - 1)


def has_states(kv_cache_config: Any) -> bool:
    return _has(MambaSpec, kv_cache_config)


def _has(kind: type[Any], kv_cache_config: Any) -> bool:
    groups = kv_cache_config.transfer_groups
    return any(isinstance(one, kind) for group in groups for one in _specs(group))


def refuse_unserved(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raise `GeometryError` for settings and caches that kvbus does not hand off."""
    _refuse_settings(vllm_config, kv_cache_config)
    for group in kv_cache_config.kv_cache_groups:
        for spec in _specs(group):
            _refuse_cache(spec, group)
            if isinstance(spec, MambaSpec):
                refuse_state(spec, vllm_config)


def _refuse_settings(vllm_config: Any, kv_cache_config: Any) -> None:
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name)
        require(size == 1, name, f"context parallelism: {name} is {size}. Set it to 1")
    require(
        not is_quantized_kv_cache(cache.cache_dtype) or cache.cache_dtype in FLOAT8,
        "kv_cache_dtype",
        f"other quantised caches than fp8 with one scale a tensor: the KV cache is of "
        f"{cache.cache_dtype}. {OTHER_DTYPE}",
    )
    require(
        not vllm_config.model_config.enable_sleep_mode,
        "enable_sleep_mode",
        "sleep mode: it frees the KV cache while the agent has it mapped. Start vLLM without "
        "--enable-sleep-mode",
    )
    images = vllm_config.model_config.multimodal_config
    require(
        images is None
        or images.language_model_only
        or images.mm_processor_cache_gb > 0
        or cache.enable_prefix_caching,
        "mm_processor_cache_gb",
        "images without a prefix cache and a cache of processed images: vLLM numbers them and does "
        "not hash them, so tickets cannot tell them apart. Set --mm-processor-cache-gb above 0",
    )
    speculative = vllm_config.speculative_config
    require(
        speculative is None or not speculative.uses_extract_hidden_states(),
        "speculative_config",
        "hidden states in the cache: extract_hidden_states",
    )
    require(
        not vllm_config.model_config.is_encoder_decoder,
        "model",
        "encoder-decoder models: their cross attention caches the encoder's states",
    )
    require(
        speculative is None
        or not speculative.uses_draft_kv_cache()
        or parallel.pipeline_parallel_size == 1,
        "pipeline_parallel_size",
        "draft layers in pipeline stages. Set pipeline_parallel_size to 1, or use a method without "
        "a draft model (ngram)",
    )
    require(len(kv_cache_config.transfer_groups) > 0, "groups", "a model without a KV cache")
    require(
        not (_has(SlidingWindowSpec, kv_cache_config) and kv_cache_config.needs_kv_cache_zeroing),
        "groups",
        "sliding windows beside states, or in a cache of mixed precision: vLLM expects zeros in "
        "front of a window",
    )


def _specs(group: Any) -> Collection[Any]:
    """Return what the layers cache; a stage without layers of the group knows its kind."""
    return caches_of(group).values() or iter_layer_specs(group.kv_cache_spec)


def _refuse_cache(cache: Any, group: Any) -> None:
    kind = type(cache).__name__
    where = f"the group of {', '.join(group.layer_names[:2])} ..."
    plain = not group.host_resident and group.role is KVCacheGroupRole.DEFAULT
    require(plain and group.enable_kv_transfer, "groups", f"HiSparse: {where}")
    require(
        type(cache) in SERVED,
        "groups",
        "other caches than of full attention, sliding windows, MLA and states: "
        f"{where} is a {kind}",
    )
    if isinstance(cache, MambaSpec):
        return
    require(
        cache.kv_quant_mode in HANDED_OFF,
        "kv_cache_dtype",
        f"quantised layers: {where} is {cache.kv_quant_mode.name}. {OTHER_DTYPE}",
    )
    require(cache.tokens_per_state == 1, "groups", f"compressed tokens: {where}")
    require(
        not any(INDEXER in name.split(".") for name in group.layer_names),
        "groups",
        f"the index of sparse attention (DSA): {where}",
    )
    if isinstance(cache, SlidingWindowSpec):
        require(cache.sliding_window > 1, "sliding_window", f"windows of one token: {where}")


def _numbered(groups: Sequence[GroupSpec]) -> tuple[GroupSpec, ...]:
    """Number groups of one kind by their first layers: the names are equal in two vLLMs."""
    numbered = []
    for one in groups:
        alike = sorted(other.layers for other in groups if other.name == one.name)
        number = f".{alike.index(one.layers)}" if len(alike) > 1 else ""
        numbered.append(replace(one, name=one.name + number))
    return tuple(numbered)


def _layers(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]
) -> Iterator[tuple[GroupSource, GroupSpec]]:
    for at, group in enumerate(kv_cache_config.transfer_groups):
        for name, cache in caches_of(group).items():
            number = layer_number(name, vllm_config)
            if isinstance(cache, MambaSpec):
                yield GroupSource(at), state_of(cache, number, vllm_config)
                continue
            source = GroupSource(at, _num_kernel_blocks(name, kv_cache_config, kv_caches.get(name)))
            for one in _attention(cache, name, vllm_config):
                size = one.block_size // source.num_kernel_blocks
                yield source, replace(one, layers=(number,), block_size=size)


def _num_kernel_blocks(name: str, kv_cache_config: Any, tensor: Any) -> int:
    """Return into how many blocks the attention kernel splits each block."""
    num_blocks: int = kv_cache_config.num_blocks
    num_split = num_blocks if tensor is None else int(tensor.shape[0])
    require(
        num_split >= num_blocks and num_split % num_blocks == 0,
        "block_size",
        f"the cache of layer '{name}' has {num_split} blocks where the scheduler has {num_blocks}",
    )
    require(
        num_split == num_blocks or not kv_cache_config.needs_kv_cache_zeroing,
        "attention_backend",
        "attention that splits blocks, beside states or in a cache of mixed precision: layer "
        f"'{name}'. Use --attention-backend FLASH_ATTN or TRITON_ATTN",
    )
    return num_split // num_blocks


def _attention(cache: Any, name: str, vllm_config: Any) -> Iterator[GroupSpec]:
    """K and V with heads of unlike sizes are two groups with one block table."""
    dtype = str(cache.dtype).removeprefix("torch.")
    if cache.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR:  # torch may call it uint8
        dtype = FLOAT8.get(vllm_config.cache_config.cache_dtype, dtype)
    require(
        dtype in DTYPE_SIZES_BYTES, "kv_cache_dtype", f"other dtypes: the KV cache is of {dtype}"
    )
    is_latent = isinstance(cache, MLAAttentionSpec)
    whole = GroupSpec(
        name=_kind(cache),
        layers=(0,),
        block_size=cache.block_size,
        num_kv_heads=1 if is_latent else _num_kv_heads(cache, name, vllm_config),
        head_dim=cache.head_size,
        dtype=dtype,
        parts=(KvPart.LATENT,) if is_latent else (KvPart.KEY, KvPart.VALUE),
        window=_window(cache) if isinstance(cache, SlidingWindowSpec) else None,
    )
    if is_latent or cache.head_size_v == cache.head_size:
        yield whole
        return
    for part, head_dim in ((KvPart.KEY, cache.head_size), (KvPart.VALUE, cache.head_size_v)):
        yield replace(whole, name=f"{whole.name}-{part}", head_dim=head_dim, parts=(part,))


def _kind(cache: Any) -> str:
    if isinstance(cache, SlidingWindowSpec):
        return f"window-{cache.sliding_window}"
    return "latent" if isinstance(cache, MLAAttentionSpec) else "full"


# A token attends to `sliding_window` tokens, including itself. So after N tokens, the next one
# needs the last `sliding_window - 1`. vLLM's cache manager keeps just these once N tokens are
# computed. The block of the token before them may be freed on one side, and never allocated on the
# other. Token N - 1 would need that token, too, if it were computed again. So prefill hands off all
# but the last token of a prompt, which decode computes anyway. A state after the last token would
# have that token twice. Draft modules look further ahead: vLLM keeps `extra_retained_tokens` more
# for them, and prefill leaves as many more to decode.
def _window(cache: SlidingWindowSpec) -> int:
    window: int = cache.sliding_window - 1 + cache.extra_retained_tokens
    return window


def _num_kv_heads(cache: Any, name: str, vllm_config: Any) -> int:
    """Count the KV heads of all ranks once. A rank's single head may be a replica."""
    tp_size: int = vllm_config.parallel_config.tensor_parallel_size
    on_each_rank: int = cache.num_kv_heads
    if on_each_rank > 1 or tp_size == 1:
        return on_each_rank * tp_size
    config = vllm_config.model_config
    if name.startswith(DRAFT_MODEL):
        config = vllm_config.speculative_config.draft_model_config
    total: int = config.get_total_num_kv_heads()
    require(
        total <= tp_size and tp_size % total == 0,
        "num_kv_heads",
        "layers that differ in KV heads, at this tensor parallel size: one has one KV head on each "
        f"of {tp_size} ranks, the model says {total} in all",
    )
    return total
