"""Tensors of an engine, described by the meaning of their axes; others are refused."""

from typing import Any

import pytest
import torch

from kvbus.engine import KvCache, RankMemory, describe_tensors
from kvbus.errors import GeometryError
from kvbus.geometry import EngineSpec, GroupSpec, StatePart, state_group

FULL = GroupSpec("full", (0, 1), block_size=4, num_kv_heads=4, head_dim=8, dtype="float16")
STATE = state_group("state", (2,), (StatePart("conv", 4, 6), StatePart("row", 1, 24)))
ENGINE = EngineSpec("e", "m", tp_size=2, groups=(FULL,))
BLOCKS, HEADS = 5, 2
SHAPE = (BLOCKS, 4, HEADS, 8)
ALL = [(layer, part) for layer in (0, 1) for part in ("k", "v")]


def numbered(*shape: int) -> torch.Tensor:
    count = torch.tensor(shape).prod()
    return torch.arange(int(count), dtype=torch.int16).view(torch.float16).reshape(shape)


def whole(memory: RankMemory, segment_id: str) -> torch.Tensor:
    storage: Any = memory.storages[segment_id]
    return torch.empty(0, dtype=torch.uint8).set_(storage._check_open())


def assert_described(memory: RankMemory, views: dict[tuple[int, str], torch.Tensor]) -> None:
    """Each view is where the regions say, in the memory that the agent maps."""
    (segment_id,) = memory.storages
    cache = KvCache(ENGINE, memory.rank, whole(memory, segment_id))
    for place, view in views.items():
        assert torch.equal(cache.view(*place).view(torch.int16), view.view(torch.int16))
        assert cache.view(*place).data_ptr() == view.data_ptr()
    memory.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_tensor_of_all_layers_and_parts_is_described_by_axes(rank: int) -> None:
    tensor = numbered(2, BLOCKS, 2, 4, HEADS, 8)
    memory = describe_tensors(
        {"full": tensor}, "kv block layer token head dim", engine=ENGINE, rank=rank
    )
    assert {region.first_head for region in memory.rank.regions} == {2 * rank}
    parts = {"k": 0, "v": 1}
    views = {(layer, part): tensor[parts[part], :, layer] for layer, part in ALL}
    assert_described(memory, views)


def test_views_of_one_storage_are_found_whatever_their_strides() -> None:
    storage = numbered(BLOCKS, 2, 2, HEADS, 4, 9)[..., :8]
    views = {
        (layer, part): storage[:, layer, "kv".index(part)].transpose(1, 2) for layer, part in ALL
    }
    memory = describe_tensors(views, engine=ENGINE)
    assert_described(memory, views)


def test_state_may_have_any_dtype_and_its_axes_are_set_by_group() -> None:
    engine = EngineSpec("e", "m", 1, (FULL, STATE))
    tensors: dict[Any, torch.Tensor] = {
        "full": numbered(2, 2, BLOCKS, 4, 4, 8),
        (2, "conv"): torch.zeros(3, 4, 3, dtype=torch.float16),
        ("state", "row"): torch.zeros(3, 1, 6, dtype=torch.float32),
    }
    memory = describe_tensors(
        tensors, {"full": "layer kv block token head dim", "state": "block head dim"}, engine=engine
    )
    assert len(memory.storages) == 3
    assert [region.group for region in memory.rank.regions] == ["full", "state", "state"]
    memory.close()


K: dict[Any, torch.Tensor] = {place: torch.zeros(SHAPE, dtype=torch.float16) for place in ALL}


@pytest.mark.parametrize(
    ("tensors", "axes", "says"),
    [
        (K, "block token heads dim", "unknown axis 'heads'"),
        (K, "block token head", "its 4 axes are not"),
        (K, "block token token dim", "each once"),
        (K, "block head token dim", "of shape .*axis 'token' has size 2, the spec requires 4"),
        ({**K, (0, "k"): K[0, "k"].double()}, None, "of float64, group 'full' of float16"),
        ({**K, (0, "k"): K[0, "k"][:3]}, None, "differ in blocks"),
        ({**K, (0, "k"): K[0, "k"][:1].expand(SHAPE)}, None, "elements overlap"),
        ({**K, (1, "k"): K[0, "k"]}, None, "overlap"),
        ({place: K[place] for place in ALL[:3]}, None, "lacks 1 of group 'full', such as 1/v"),
        ({**K, (7, "k"): K[0, "k"]}, None, "7 is a layer, or the name, of 0 groups"),
        ({**K, ("full", "x"): K[0, "k"]}, None, "the parts of 'full' are k, v"),
    ],
    ids=[
        "axis",
        "too few",
        "twice",
        "order",
        "dtype",
        "blocks",
        "expanded",
        "shared",
        "missing",
        "layer",
        "part",
    ],
)
def test_tensors_of_no_cache_are_refused_unmoved(tensors: Any, axes: str | None, says: str) -> None:
    before = [tensor.data_ptr() for tensor in tensors.values()]
    with pytest.raises(GeometryError, match=says):
        describe_tensors(tensors, *([axes] if axes else []), engine=ENGINE)
    assert [tensor.data_ptr() for tensor in tensors.values()] == before
