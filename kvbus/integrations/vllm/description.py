"""The engine as kvbus names it: model, groups, layers, heads, from vLLM's configuration alone.

The scheduler's process has no tensors, and must say the same as the workers.
"""

from typing import Any

from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowSpec

from kvbus.errors import GeometryError
from kvbus.geometry import (
    DTYPE_SIZES_BYTES,
    EngineSpec,
    GroupSpec,
    KvPart,
    validate_engine,
)
from kvbus.integrations.vllm.refusals import cache_of, refuse_unserved, require


def describe_engine(
    vllm_config: Any, kv_cache_config: Any, *, engine_id: str, model: str | None = None
) -> EngineSpec:
    """The spec that every process of this vLLM registers, and that its reader must match.

    ``model`` overrides `model_name`. Group i is transfer group i of ``kv_cache_config``, and the
    i-th of what its `select_transfer_block_ids` gives. Raises `GeometryError` for what is not
    served.
    """
    refuse_unserved(vllm_config, kv_cache_config)
    parallel = vllm_config.parallel_config
    groups = kv_cache_config.transfer_groups
    named = zip(group_names(groups), groups, strict=True)
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
    """The model as both sides of a handoff must have it: weights, revision, quantisation.

    A model that lies in a folder has the folder's path for a name: where the two sides' differ,
    give both the same name in the connector's options.
    """
    name = f"{model_config.model}@{model_config.revision or 'main'}"
    return f"{name}+{model_config.quantization}" if model_config.quantization else name


def group_names(groups: Any) -> list[str]:
    """Names that say what a group of vLLM is, so that another vLLM gives its like the same.

    "full", "latent", or "window-4096"; where there are several of a kind they are numbered, by
    their first layers.
    """
    kinds = [_kind(cache_of(group)) for group in groups]
    firsts = [(min(layer_numbers(group)), at) for at, group in enumerate(groups)]
    names = []
    for kind, first in zip(kinds, firsts, strict=True):
        alike = sorted(one for one, other in zip(firsts, kinds, strict=True) if other == kind)
        names.append(kind if len(alike) == 1 else f"{kind}.{alike.index(first)}")
    return names


def layer_numbers(group: Any) -> list[int]:
    """Numbers of the layers in the whole model; raises `GeometryError` for names without one."""
    return [layer_number(name) for name in group.layer_names]


def layer_number(name: str) -> int:
    """The number of the layer whose attention is called ``name``."""
    try:
        return int(extract_layer_index(name))
    except (AssertionError, ValueError) as error:
        raise GeometryError(
            f"vLLM cannot be served by kvbus: layer '{name}' has not one number", field="layers"
        ) from error


def _kind(cache: Any) -> str:
    if isinstance(cache, SlidingWindowSpec):
        return f"window-{cache.sliding_window}"
    return "latent" if isinstance(cache, MLAAttentionSpec) else "full"


def _describe_group(name: str, group: Any, vllm_config: Any) -> GroupSpec:
    cache = cache_of(group)
    dtype = str(cache.dtype).removeprefix("torch.")
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
        window=_window(cache),
    )


def _window(cache: Any) -> int | None:
    """How many of the tokens that were computed the next one needs.

    A token attends to ``sliding_window`` tokens, itself one of them. So of N tokens the next one
    needs the last ``sliding_window - 1``, which is what vLLM's cache manager keeps when N are
    computed: the block of the token before those may be gone on the one side and was never given
    on the other. Token N - 1, were it computed again, would need that one too: hand over all but
    the last token of a prompt, which vLLM computes anyway.
    """
    return cache.sliding_window - 1 if isinstance(cache, SlidingWindowSpec) else None


def _all_layers(group: Any, vllm_config: Any) -> tuple[int, ...]:
    """Those of all pipeline stages: a process of vLLM only knows the names of its own."""
    numbers = tuple(sorted(layer_numbers(group)))
    if vllm_config.parallel_config.pipeline_parallel_size == 1:
        return numbers
    layers = tuple(range(vllm_config.model_config.get_total_num_hidden_layers()))
    require(
        set(numbers) <= set(layers), "layers", f"layers {numbers} of {len(layers)} in the model"
    )
    return layers


def _num_kv_heads(cache: Any, vllm_config: Any) -> int:
    """Of all ranks, each counted once.

    A rank with several heads has them alone. One head of each rank may be a replica; then the
    model says how many there are.
    """
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
