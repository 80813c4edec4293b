"""Chaos finds no damage in an act, and a soak no leak; planted damage and growth are found."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.geometry import KvLayout
from tests.support.memories import Memory, private_cache
from tests.support.pattern import Pool, views_of
from tests.tools.chaos.shapes import SHAPES
from tests.tools.chaos.soak import LIMITS, MIB, NUM_PERIODS, Sample, judge

ROOT = Path(__file__).parents[3]
ENDS_WITHIN_S = 400
STEP, NUM_SAMPLES, CAP_BYTES = 20_000, 30, 100 * MIB
START = Sample(
    num_handoffs=0, anonymous_bytes=150 * MIB, num_descriptors=80, num_threads=10, num_mappings=1100
)
noise = st.lists(st.integers(0, MIB), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES)


def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    command = [sys.executable, "-m", "tests.tools.chaos", *arguments]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
    )
    assert ended.stdout, ended.stderr
    return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()]


@pytest.mark.timeout(ENDS_WITHIN_S + 20)
def test_an_act_of_chaos_has_no_wrong_byte_and_everything_ends() -> None:
    status, (found,) = run("--seed", "7", "--minutes", "0.4")

    assert found["violations"] == [], found
    assert status == 0
    assert found["fetches_completed"]
    assert found["rogue_heard"]
    assert found["rogue_answered"]
    assert found["held_fetches_completed"]
    assert found["parked_offers_read"]


@pytest.mark.long
@pytest.mark.timeout(ENDS_WITHIN_S + 20)
def test_short_soak_uses_each_path_and_leaks_no_fd_or_thread() -> None:
    """Memory is another matter: what is allocated once is large beside so few handoffs."""
    status, (*acts, found) = run("--soak", "small", "--minutes", "0.2")

    assert (status, found["violations"]) == (0 if found["flat"] else 1, [])
    assert len(acts) == NUM_PERIODS
    assert found["paths"].keys() >= {"mapped", "direct", "packed"}
    assert found["held_fetches_completed"]
    assert found["parked_offers_read"]
    for name, verdict in found["agents"].items():
        assert verdict["num_handoffs"]
        assert verdict["grows"].keys() <= {"other_bytes"}
        assert acts[-1]["agents"][name]["ended_bytes"]
        assert acts[-1]["agents"][name]["anonymous_bytes"] > MIB


def test_changed_bit_in_free_block_is_reported_with_last_owner() -> None:
    (shape,) = (shape for shape in SHAPES if shape.name == "d-wide")
    memory = Memory(KvLayout.parse(shape.layout))
    caches = [private_cache(shape.spec, rank, memory, 8) for rank in range(shape.tp)]
    cache, found = views_of(shape.spec, caches), list[tuple[str, str]]()
    pool = Pool(cache, {"full": 8, "window": 8}, lambda *of: found.append(of), 1)
    blocks = pool.take({"full": 2, "window": 0}, "fetch 5")
    assert blocks is not None
    pool.give(blocks)
    pool.check()
    found_before = list(found)

    cache[0].bits[blocks["full"][0], 3, 0, 0] ^= 1
    pool.check()

    assert found_before == []
    assert found == [("late_write", "1 free blocks changed after fetch 5")]


@given(noise, st.integers(1, 10), st.sampled_from([(CAP_BYTES, 100), (1 << 40, 1000)]))
def test_bytes_left_by_handoffs_are_growth_but_full_caches_not(
    noise: list[int], times: int, caps: tuple[int, int]
) -> None:
    cap_bytes, least_bytes = caps
    leak_bytes, flat = times * least_bytes, soaked(noise, cap_bytes)
    leaky = [
        replace(o, anonymous_bytes=o.anonymous_bytes + leak_bytes * o.num_handoffs) for o in flat
    ]

    assert judge(flat).are_caps_full is (cap_bytes == CAP_BYTES)
    assert not judge(flat).grows
    assert judge(leaky).grows.keys() == {"other_bytes"}
    assert judge(leaky).bytes_by_handoff == pytest.approx(leak_bytes, abs=20)


@pytest.mark.parametrize("name", sorted(LIMITS.keys() - {"other_bytes"}))
def test_what_is_left_behind_now_and_then_is_called_growth(name: str) -> None:
    flat = soaked([0] * NUM_SAMPLES, CAP_BYTES)
    leaky = [replace(one, **{name: getattr(one, name) + at * 3}) for at, one in enumerate(flat)]

    assert judge(leaky).grows.keys() == {name}


def soaked(noise: Sequence[int], cap_bytes: int) -> list[Sample]:
    """An agent without a leak: 400 bytes are kept of each handoff, up to the cap."""
    samples = []
    for at, some in enumerate(noise):
        kept, number = min(cap_bytes, 400 * at * STEP), at * STEP
        used = START.anonymous_bytes + kept + some
        samples.append(replace(START, num_handoffs=number, anonymous_bytes=used, ended_bytes=kept))
    return samples
