"""Parts of states: each unit of the model is at one place, whatever ranks and layouts there are."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils", reason="make test-vllm")

from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind
from vllm.v1.kv_cache_interface import MambaSpec

from kvbus.errors import GeometryError
from kvbus.geometry import held_heads
from kvbus.integrations.vllm.states import refuse_state, state_of, state_views

ROWS, NUM_BLOCKS = 3, 2
# Channels of each part of the convolution, in units of (number, size); then the recurrent state.
# Sizes are those of Qwen3-Next-80B, Nemotron-H-8B (8 groups), Falcon-H1 (1 group), Falcon-Mamba-7B
# and LFM2, with fewer heads.
MODELS: dict[str, tuple[Kind, list[tuple[int, int]], tuple[int, ...] | None]] = {
    "gated delta net": (Kind.GDN_ATTN, [(4, 128), (4, 128), (8, 128)], (8, 128, 128)),
    "mamba 2 of 8 groups": (Kind.MAMBA2, [(16, 64), (8, 128), (8, 128)], (16, 64, 128)),
    "mamba 2 of 1 group": (Kind.MAMBA2, [(8, 64), (1, 256), (1, 256)], (8, 64, 256)),
    "mamba 1": (Kind.MAMBA1, [(64, 1)], (64, 16)),
    "short convolution": (Kind.SHORT_CONV, [(64, 1)], None),
}


@pytest.fixture(params=["SD", "DS"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's [row, channel] or [channel, row] of convolutions."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    get_conv_state_layout.cache_clear()
    yield request.param
    get_conv_state_layout.cache_clear()


def config(tp_size: int, name: str) -> Any:
    num_groups = MODELS[name][1][-1][0]
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp_size),
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(n_groups=num_groups)),
    )


def rank_of(
    name: str, rank: int, tp_size: int, layout: str
) -> tuple[MambaSpec, list[torch.Tensor]]:
    """What vLLM keeps on a rank, of states in which each number is another one."""
    kind, channels, recurrent = MODELS[name]
    parts, first = [], 0
    for num_units, size in channels:
        shape = (NUM_BLOCKS, num_units, size, ROWS)
        whole = (first + torch.arange(NUM_BLOCKS * num_units * size * ROWS)).reshape(shape).float()
        first += whole.numel()
        held = held_heads(rank, tp_size, num_units)
        parts.append(whole[:, held.start : held.stop].flatten(1, 2))
    conv = torch.cat(parts, dim=1)
    tensors = [conv if layout == "DS" else conv.transpose(1, 2).contiguous()]
    if recurrent is not None:
        each = torch.arange(NUM_BLOCKS * torch.Size(recurrent).numel()).double()
        share = recurrent[0] // tp_size
        whole = each.reshape(NUM_BLOCKS, *recurrent)
        tensors.append(whole[:, rank * share : (rank + 1) * share].contiguous())
    spec = MambaSpec(
        block_size=32,
        shapes=tuple(tuple(one.shape[1:]) for one in tensors),
        dtypes=tuple(one.dtype for one in tensors),
        mamba_type=kind,
    )
    return spec, tensors


@pytest.mark.kind(
    "states of Mamba 1 and 2, gated delta nets and short convolutions, on any number of ranks",
    on="memory",
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_units_of_all_ranks_are_those_of_one_rank(layout: str, name: str, tp_size: int) -> None:
    alone, tensors = rank_of(name, 0, 1, layout)
    refuse_state(alone, config(1, name))
    group = state_of(alone, 3, config(1, name))
    whole = state_views(alone, tensors, config(1, name))
    assert sum(part.num_units * part.unit_bytes for part in group.state) == sum(
        one[0].numel() * one.element_size() for one in tensors
    )

    for rank in range(tp_size):
        spec, held = rank_of(name, rank, tp_size, layout)
        assert state_of(spec, 3, config(tp_size, name)) == group
        views = state_views(spec, held, config(tp_size, name))
        for part in group.state:
            units = held_heads(rank, tp_size, part.num_units)
            view, right = views[part.name], whole[part.name][:, units.start : units.stop]
            assert torch.equal(view, right)
            assert view.stride(2) == 1


def test_states_of_unlike_dtype_or_layout_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def parts(layout: str, *dtypes: torch.dtype) -> Sequence[Any]:
        monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", layout)
        get_conv_state_layout.cache_clear()
        spec, _ = rank_of("mamba 1", 0, 1, layout)
        fields = {"block_size": 32, "shapes": spec.shapes, "mamba_type": Kind.MAMBA1}
        return state_of(MambaSpec(**fields, dtypes=dtypes), 0, config(1, "mamba 1")).state

    half, brain = torch.float16, torch.bfloat16
    different = [parts("SD", half, half), parts("SD", brain, half), parts("DS", half, half)]
    get_conv_state_layout.cache_clear()

    assert len(set(different)) == 3


def test_model_without_number_of_groups_is_refused_in_ranks() -> None:
    spec, _ = rank_of("mamba 2 of 1 group", 0, 2, "SD")
    without = config(2, "mamba 2 of 1 group")
    without.model_config.hf_text_config = SimpleNamespace()

    with pytest.raises(GeometryError, match="names no groups"):
        refuse_state(spec, without)
