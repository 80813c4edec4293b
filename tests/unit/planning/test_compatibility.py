"""Engines that differ in meaning are refused by field and both values; other shapes are not."""

import msgspec
import pytest

from kvbus.errors import ErrorCode, GeometryError
from kvbus.geometry import EngineSpec, GroupSpec, KvPart, StatePart, state_group
from kvbus.planning import check_compatible

replace = msgspec.structs.replace
GROUP = GroupSpec("full", (0, 1, 10), 4, 2, 8, "float16", (KvPart.KEY, KvPart.VALUE), 128)
CONV, SSM = StatePart("conv", 1, 6), StatePart("ssm", 4, 8)
STATE = state_group("mamba", (2, 3), (CONV, SSM))
ENGINE = EngineSpec("prefill", "llama@1", 1, (GROUP, STATE))


def with_group(**changes: object) -> EngineSpec:
    return replace(ENGINE, groups=(replace(GROUP, **changes), STATE))


def with_state(*parts: StatePart) -> EngineSpec:
    return replace(ENGINE, groups=(GROUP, state_group("mamba", (2, 3), parts)))


WIDER = StatePart("ssm", 4, 16)
DIFFERENCES: dict[str, tuple[EngineSpec, str, str, str]] = {
    "model": (replace(ENGINE, model="llama@2"), "model", "llama@1", "llama@2"),
    "group_called_otherwise": (with_group(name="sliding"), "groups", "full,mamba", "mamba,sliding"),
    "group_missing": (replace(ENGINE, groups=(GROUP,)), "groups", "full,mamba", "full"),
    "layers": (with_group(layers=(0, 1, 11)), "full.layers", "0,1,10", "0,1,11"),
    "dtype": (with_group(dtype="bfloat16"), "full.dtype", "float16", "bfloat16"),
    "num_kv_heads": (with_group(num_kv_heads=4), "full.num_kv_heads", "2", "4"),
    "head_dim": (with_group(head_dim=16), "full.head_dim", "8", "16"),
    "parts": (with_group(parts=(KvPart.LATENT,)), "full.parts", "k,v", "latent"),
    "window": (with_group(window=None), "full.window", "128", "None"),
    "state_part_missing": (with_state(SSM), "mamba.parts", "conv,ssm", "ssm"),
    "state_bytes": (with_state(CONV, WIDER), "mamba.state", f"{CONV},{SSM}", f"{CONV},{WIDER}"),
}


@pytest.mark.parametrize(
    ("other", "field", "ours", "theirs"), DIFFERENCES.values(), ids=DIFFERENCES
)
def test_a_field_that_differs_is_refused_with_both_values(
    other: EngineSpec, field: str, ours: str, theirs: str
) -> None:
    for sides, values in (((ENGINE, other), (ours, theirs)), ((other, ENGINE), (theirs, ours))):
        with pytest.raises(GeometryError) as refused:
            check_compatible(*sides)
        found = {"field": field, **dict(zip(("prefill", "decode"), values, strict=True))}
        assert (refused.value.code, refused.value.detail) == (ErrorCode.INCOMPATIBLE, found)
        assert all(text in refused.value.message for text in (field, *values))


def test_every_field_of_a_group_is_compared_but_its_block_size() -> None:
    compared = {field.partition(".")[2] for _, field, _, _ in DIFFERENCES.values()} - {""}
    assert {*compared, "name", "block_size", "optional"} == set(GroupSpec.__struct_fields__)


SAME: dict[str, EngineSpec] = {
    "itself": ENGINE,
    "engine_id": replace(ENGINE, engine_id="decode"),
    "tp_size": replace(ENGINE, tp_size=4),
    "pp_size": replace(ENGINE, pp_size=2),
    "block_size": with_group(block_size=48),
    "order_of_layers": with_group(layers=(10, 0, 1)),
    "order_of_parts": with_group(parts=(KvPart.VALUE, KvPart.KEY)),
    "order_of_state_parts": with_state(SSM, CONV),
    "order_of_groups": replace(ENGINE, groups=(STATE, GROUP)),
}


@pytest.mark.parametrize("other", SAME.values(), ids=SAME)
def test_other_parallelism_block_size_or_order_is_compatible(other: EngineSpec) -> None:
    check_compatible(ENGINE, other)
    check_compatible(other, ENGINE)
