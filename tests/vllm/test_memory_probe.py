"""Where a layer writes is measured, and a layout that strides cannot say is refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.engine.arg_utils", reason="needs vLLM: make test-vllm")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla")

from kvbus.errors import GeometryError
from kvbus.geometry import AxisName, GroupSpec, KvPart
from kvbus.integrations.vllm.probe import LayerProbe, PartLayout
from tests.vllm.configured import attention, caches, configure, full, latent_attention, layers

B, T, H, D = AxisName.BLOCK, AxisName.TOKEN, AxisName.HEAD, AxisName.DIM
NAME = "model.layers.0.self_attn.attn"
Write = Callable[..., None]


def group_of(dtype: str = "float32", **changes: Any) -> GroupSpec:
    sizes = {"block_size": 32, "num_kv_heads": 4, "head_dim": 32}
    return GroupSpec(name="full", layers=(0,), dtype=dtype, **{**sizes, **changes})


def on_the_cpu(
    folder: Path, dtype: str, *, block_size: int = 32, head_size: int = 32, isa: str = "vec"
) -> tuple[Any, torch.Tensor, GroupSpec]:
    """A layer of the CPU backend, its cache, and the group of both."""
    kind = getattr(torch, dtype)
    spec = full(block_size=block_size, head_size=head_size, dtype=kind)
    case = configure(folder, layers(spec), dtype=dtype, block_size=block_size)
    cache = caches(case.workers[0])[NAME]
    group = group_of(dtype, block_size=block_size, head_dim=head_size)
    return attention(case.vllm_config, cache, isa=isa), cache, group


def probed(layer: Any, cache: torch.Tensor, group: GroupSpec) -> dict[str, PartLayout]:
    heads = group.num_kv_heads
    probe = LayerProbe(NAME, layer, cache, group=group, num_heads=heads, dtype=cache.dtype)
    return probe.layouts()


def writing(write: Write) -> Any:
    return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=write))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("block_size", "head_size", "isa"), [(32, 32, "vec"), (64, 128, "vec"), (32, 80, "vec16")]
)
def test_the_cpu_backend_has_keys_by_element_and_values_by_token(
    tmp_path: Path, dtype: str, block_size: int, head_size: int, isa: str
) -> None:
    case = on_the_cpu(tmp_path, dtype, block_size=block_size, head_size=head_size, isa=isa)

    found = probed(*case)

    one = case[1].element_size()
    half, outer = block_size * head_size * one, {H: 2 * block_size * head_size * one}
    outer |= {B: 4 * outer[H]}
    keys, values = {D: block_size * one, T: one}, {T: head_size * one, D: one}
    assert found[KvPart.KEY] == PartLayout(0, outer | keys)
    assert found[KvPart.VALUE] == PartLayout(half, outer | values)


@pytest.mark.skipif(
    "amx_tile" not in Path("/proc/cpuinfo").read_text(), reason="this CPU has no AMX"
)
def test_the_tiles_of_amx_are_refused_with_the_layer_and_what_to_do(tmp_path: Path) -> None:
    case = on_the_cpu(tmp_path, "bfloat16", isa="amx")

    with pytest.raises(GeometryError, match=r"no strides .* 'k' .* --dtype float16") as refused:
        probed(*case)

    assert refused.value.detail["layer"] == NAME


def test_a_latent_is_the_compressed_kv_and_the_rotated_key_in_one_row() -> None:
    cache = torch.zeros(7, 1, 16, 576)
    group = group_of(block_size=16, num_kv_heads=1, head_dim=576, parts=(KvPart.LATENT,))

    found = probed(latent_attention(cache, kv_lora_rank=512), cache, group)

    strides = {B: 16 * 576 * 4, T: 576 * 4, D: 4}
    assert found == {KvPart.LATENT: PartLayout(0, strides)}


def test_any_order_of_axes_is_found() -> None:
    cache = torch.zeros(9, 2, 32, 4, 32).permute(0, 3, 2, 4, 1)  # [block, head, token, dim, part]

    def write(_: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
        for slot, k, v in zip(slots.tolist(), key, value, strict=True):
            cache[slot // 32, :, slot % 32, :, 0] = v
            cache[slot // 32, :, slot % 32, :, 1] = k

    found = probed(writing(write), cache, group_of())

    strides = {B: 2 * 32 * 4 * 32 * 4, T: 4 * 32 * 4, H: 32 * 4, D: 4}
    assert found[KvPart.VALUE] == PartLayout(0, strides)
    assert found[KvPart.KEY] == PartLayout(32 * 4 * 32 * 4, strides)


def test_an_axis_of_one_index_has_no_stride(tmp_path: Path) -> None:
    case = configure(tmp_path, layers(full(1)), model={"num_key_value_heads": 1})
    cache = caches(case.workers[0])[NAME]

    found = probed(attention(case.vllm_config, cache), cache, group_of(num_kv_heads=1))

    assert H not in found[KvPart.KEY].strides_bytes


def test_neither_the_cache_nor_random_numbers_of_vllm_are_touched(tmp_path: Path) -> None:
    layer, cache, group = on_the_cpu(tmp_path, "float32")
    cache.fill_(3)
    before = torch.get_rng_state()

    probed(layer, cache, group)

    assert bool((cache == 3).all())
    assert torch.equal(torch.get_rng_state(), before)


def flat(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(-1, 4, 32, 2, 32)  # block, head, token, part, dim


def plain(_: Any, key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: Any) -> None:
    """What the writers below do wrong in one place each."""
    for slot, k, v in zip(slots.tolist(), key, value, strict=True):
        flat(cache)[slot // 32, :, slot % 32, 0] = k
        flat(cache)[slot // 32, :, slot % 32, 1] = v


def swizzled(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    """Pairs of elements change places in every other token from the third on."""
    odd = (slots % 4 == 3)[:, None, None]
    swapped = key.view(*key.shape[:-1], -1, 2).flip(-1).reshape(key.shape)
    plain(layer, torch.where(odd, swapped, key), value, cache, slots)


def last_block_apart(layer: Any, key: torch.Tensor, value: Any, cache: Any, slots: Any) -> None:
    """Blocks do not follow each other as the first two do."""
    plain(layer, key, value, cache, torch.where(slots >= 64, (slots - 64 + 16) % 32 + 64, slots))


def scaled(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    plain(layer, key * 2, value, cache, slots)


def negative(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    plain(layer, key.flip(-1), value, cache, slots)


def twice(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    plain(layer, key, key + value, cache, slots)


def nothing(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    pass


def failing(layer: Any, key: torch.Tensor, value: torch.Tensor, cache: Any, slots: Any) -> None:
    raise RuntimeError("no kernel")


REFUSED: dict[Write, str] = {
    swizzled: "no strides describe where 'k' is",
    last_block_apart: "no strides describe where 'k' is",
    scaled: "no strides describe where 'k' is",
    negative: "'k' runs backwards",
    twice: "one number of 'k' is written to 2 places",
    nothing: "one number of 'k' is written to 0 places",
    failing: "does not write it: no kernel",
}


def test_the_plain_writer_is_described() -> None:
    assert probed(writing(plain), torch.zeros(5, 4, 32, 64), group_of())


@pytest.mark.parametrize("write", REFUSED, ids=lambda write: write.__name__)
def test_what_strides_cannot_say_is_refused(write: Write) -> None:
    with pytest.raises(GeometryError, match=REFUSED[write]) as refused:
        probed(writing(write), torch.zeros(5, 4, 32, 64), group_of())

    assert refused.value.detail["layer"] == NAME


def test_a_cache_with_scales_beside_the_kv_is_refused() -> None:
    def write(layer: Any, key: Any, value: Any, cache: torch.Tensor, slots: Any) -> None:
        for slot, k, v in zip(slots.tolist(), key, value, strict=True):
            cache[slot // 32, :, slot % 32, :32] = k
            cache[slot // 32, :, slot % 32, 32:64] = v
            cache[slot // 32, :, slot % 32, 64] = k.amax(-1) // 2

    with pytest.raises(GeometryError, match="holds more than the KV"):
        probed(writing(write), torch.zeros(5, 4, 32, 65), group_of())


def test_a_backend_that_writes_only_while_it_attends_is_refused() -> None:
    layer = SimpleNamespace(impl=SimpleNamespace())

    with pytest.raises(GeometryError, match="while it attends"):
        probed(layer, torch.zeros(5, 4, 32, 64), group_of())
