"""Random combinations of everything in which two engines may differ, against the plain oracle."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvbus.geometry import AxisName, GroupSpec, KvLayout, KvPart, StatePart, state_group
from tests.examples import num_examples
from tests.memories import Memory
from tests.process.shapes import PATHS, ShapedAgents, Side, hand_over, two_engines

MAX_TOKENS = 90
NUM_HEADS = (1, 2, 3, 4, 8)
BLOCK_SIZES = (1, 4, 6, 16, 24, 48, 64)
COMBINATIONS = settings(
    max_examples=num_examples(160),  # on each path
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),  # each example starts engines: shrinking takes long
)


@dataclass(frozen=True)
class Handover:
    """One request between two engines."""

    groups: tuple[GroupSpec, ...]
    prefill: Side
    decode: Side
    num_tokens: int
    first_token: int
    offered: int
    steps: tuple[int, ...]
    only_tails: bool
    zero_tail: bool


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    """The known ones, or any order."""
    named = draw(st.sampled_from(["NHD", "HND", ""]))
    if named:
        return KvLayout.parse(named, cross_layer=draw(st.booleans()))
    axes = [axis for axis in AxisName if axis is not AxisName.LAYER or draw(st.booleans())]
    return KvLayout(tuple(draw(st.permutations(axes))))


@st.composite
def sides(draw: st.DrawFn, num_layers: int) -> Side:
    """An engine of at most 6 ranks: at one agent, at two of them, or with a ring."""
    tp = draw(st.sampled_from([1, 1, 2, 3, 4, 6]))
    pp = draw(st.integers(1, min(num_layers, 3, 6 // tp)))
    size = draw(st.sampled_from(BLOCK_SIZES))
    direct = draw(st.integers(0, 3)) > 0
    places = draw(st.just("") | st.text("01", min_size=tp * pp, max_size=tp * pp))
    if places:
        return Side(tp, pp, size, Memory(draw(layouts()), direct=direct), places=places)
    apart, padding = draw(st.booleans()), draw(st.sampled_from([0, 0, 1, 2]))
    memory = Memory(draw(layouts()), apart, padding, direct=direct)
    return Side(tp, pp, size, memory, host=draw(st.integers(0, 3)) == 0)


@st.composite
def groups(draw: st.DrawFn) -> tuple[GroupSpec, ...]:
    """One to three groups, their layers interleaved."""
    kinds = draw(
        st.lists(
            st.sampled_from(["full", "window", "latent", "state"]),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    made = []
    for number, kind in enumerate(kinds):
        layers = tuple(range(number, number + len(kinds) * draw(st.integers(1, 3)), len(kinds)))
        if kind == "state":
            units = draw(st.sampled_from([2, 5, 6]))
            # of one byte, it may lie in another order than "norm", and then nothing is reordered
            parts = StatePart("conv", units, draw(st.integers(2, 9))), StatePart("norm", 1, 5)
            made.append(state_group(kind, layers, parts))
            continue
        latent = kind == "latent"
        made.append(
            GroupSpec(
                kind,
                layers,
                1,
                1 if latent else draw(st.sampled_from(NUM_HEADS)),
                draw(st.sampled_from([5, 24] if latent else [1, 2])),
                draw(st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"])),
                (KvPart.LATENT,) if latent else (KvPart.KEY, KvPart.VALUE),
                draw(st.integers(1, 40)) if kind == "window" else None,
            )
        )
    return tuple(made)


@st.composite
def handovers(draw: st.DrawFn) -> Handover:
    """Any request between any two engines of one model."""
    model = draw(groups())
    num_layers = sum(len(group.layers) for group in model)
    num_tokens = draw(st.integers(0, MAX_TOKENS))
    has_state = any(group.state for group in model)
    more = 0 if has_state else draw(st.sampled_from([0, 0, 1, 17]))
    offered = num_tokens + more
    steps = draw(st.lists(st.integers(0, offered), max_size=3).map(sorted))
    return Handover(
        groups=model,
        prefill=draw(sides(num_layers)),
        decode=draw(sides(num_layers)),
        num_tokens=num_tokens,
        first_token=draw(st.one_of(st.just(0), st.integers(0, num_tokens))),
        offered=offered,
        steps=tuple(steps),
        only_tails=not steps and not more and draw(st.booleans()),
        zero_tail=draw(st.booleans()),
    )


@pytest.mark.anyio
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", PATHS)
@COMBINATIONS
@given(case=handovers())
async def test_any_combination_arrives_bit_by_bit(
    shapes: ShapedAgents, path: str, case: Handover
) -> None:
    prefill = registered(case.prefill) if path == "direct" else case.prefill
    decode = registered(case.decode) if path in ("direct", "reordered") else case.decode
    shape: dict[str, Any] = {"groups": case.groups, "max_tokens": case.offered}
    async with two_engines(shapes, path, prefill, decode, **shape) as (source, target):
        await hand_over(
            source,
            target,
            case.num_tokens,
            first_token=case.first_token,
            offered=case.offered,
            steps=case.steps,
            only_tails=case.only_tails,
            zero_tail=case.zero_tail,
        )


def registered(side: Side) -> Side:
    """Such an engine whose memory NIXL is told of."""
    return replace(side, memory=replace(side.memory, direct=True))
