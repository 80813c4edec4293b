"""States of Mamba, gated delta nets and short convolutions: their parts, and where these are.

vLLM keeps the state of a request in one block: first the inputs that the convolution still needs,
then the recurrent state. Both have a unit for each head, channel or group, of which a rank has its
share.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from kvbus.geometry import GroupSpec, StatePart, state_group
from kvbus.integrations.vllm.params import require

Kind = MambaAttentionBackendEnum
SERVED = (Kind.MAMBA1, Kind.MAMBA2, Kind.GDN_ATTN, Kind.SHORT_CONV)
NUM_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
"""Keys of Mamba 2 in models' configurations."""


class Channels(NamedTuple):
    """Channels of a convolution on this rank, and the units of all ranks."""

    name: str
    num_units: int
    unit_size: int
    total_units: int


def refuse_state(spec: MambaSpec, vllm_config: Any) -> None:
    """Raise `GeometryError`, also if the shapes do not divide into the parts of their kind."""
    kind = spec.mamba_type.name.lower()
    require(
        spec.mamba_type in SERVED and not spec.tp_replicated,
        "groups",
        "other states than of Mamba 1 and 2, gated delta nets and short convolutions: one is of "
        f"kind {kind}",
    )
    num_tensors = 1 if spec.mamba_type is Kind.SHORT_CONV else 2
    require(
        len(spec.shapes) == num_tensors,
        "mamba_backend",
        f"states in other tensors: kind {kind} has {len(spec.shapes)}, kvbus hands off "
        f"{num_tensors}. Use another --mamba-backend",
    )
    require(
        spec.num_speculative_blocks == 0,
        "speculative_config",
        "states with speculative decoding: vLLM keeps one for each draft",
    )
    state_of(spec, 0, vllm_config)


def state_of(spec: MambaSpec, layer: int, vllm_config: Any) -> GroupSpec:
    parts = tuple(
        StatePart(name, total, view.shape[2] * view.element_size())
        for name, total, view in _views(spec, _samples(spec), vllm_config)
    )
    return state_group(f"state-{spec.mamba_type.name.lower()}", (layer,), parts)


def state_views(
    spec: MambaSpec, tensors: Sequence[torch.Tensor], vllm_config: Any
) -> Mapping[str, torch.Tensor]:
    """Return each part as [block, unit, element]; ``tensors`` are [block, ...]."""
    return {name: view for name, _, view in _views(spec, tensors, vllm_config)}


def _samples(spec: MambaSpec) -> list[torch.Tensor]:
    return [
        torch.empty((1, *shape), dtype=dtype, device="meta")
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
    ]


# The name of a part has its dtype, as its bytes do not show it. vLLM lays a convolution out as
# [row, channel], or as [channel, row] (VLLM_SSM_CONV_STATE_LAYOUT). In the first layout each row is
# a part, so that the bytes of a unit follow each other.
def _views(
    spec: MambaSpec, tensors: Sequence[torch.Tensor], vllm_config: Any
) -> Iterator[tuple[str, int, torch.Tensor]]:
    tp_size: int = vllm_config.parallel_config.tensor_parallel_size
    conv, *recurrent = tensors
    start, channels = 0, _channels(spec, vllm_config)
    by_channel = is_conv_state_dim_first()
    for name, num_units, unit_size, total in channels:
        end = start + num_units * unit_size
        label = f"{name}.{_dtype(conv)}"
        if by_channel:
            rows = conv.shape[2]
            units = conv[:, start:end].view(-1, num_units, unit_size * rows)
            yield label, total, units
        else:
            for row in range(conv.shape[1]):
                view = conv[:, row, start:end].view(-1, num_units, unit_size)
                yield f"{label}.{row}", total, view
        start = end
    width = conv.shape[1 if by_channel else 2]
    require(start == width, "shapes", f"a convolution has {width} channels, its parts {start}")
    for state in recurrent:
        yield f"recurrent.{_dtype(state)}", state.shape[1] * tp_size, state.flatten(2)


def _channels(spec: MambaSpec, vllm_config: Any) -> tuple[Channels, ...]:
    tp_size: int = vllm_config.parallel_config.tensor_parallel_size
    width = spec.shapes[0][0 if is_conv_state_dim_first() else 1]
    if spec.mamba_type in (Kind.MAMBA1, Kind.SHORT_CONV):
        return (Channels("conv", width, 1, width * tp_size),)
    num_heads, head_dim, last = spec.shapes[1]
    value = Channels("conv-v", num_heads, head_dim, num_heads * tp_size)
    num_keys = (width - prod(value[1:3])) // 2 // last  # heads, or groups of Mamba 2
    if spec.mamba_type is Kind.GDN_ATTN:
        query, key = (Channels(f"conv-{one}", num_keys, last, num_keys * tp_size) for one in "qk")
        return query, key, value
    total = num_keys * tp_size
    if num_keys == 1 and tp_size > 1:  # each rank has its own group, or a copy of the only one
        total = min(_num_groups(vllm_config), tp_size)
    first, second = (Channels(f"conv-{one}", num_keys, last, total) for one in "bc")
    return Channels("conv-x", *value[1:]), first, second


def _num_groups(vllm_config: Any) -> int:
    config = vllm_config.model_config.hf_text_config
    found = [getattr(config, name) for name in NUM_GROUPS if hasattr(config, name)]
    require(bool(found), "n_groups", "the model's configuration names no groups of Mamba 2")
    return int(found[0])


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
