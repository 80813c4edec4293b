"""Seconds of a soak, and that what grows is called so."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.soak.__main__ import NUM_PERIODS
from tests.tools.soak.load import READERS
from tests.tools.soak.verdict import LIMITS, MIB, Sample, judge

ROOT = Path(__file__).parents[3]
ENDS_WITHIN_S = 200
STEP = 20_000
NUM_SAMPLES = 30
CAP_BYTES = 100 * MIB
START = Sample(
    num_handoffs=0, anonymous_bytes=150 * MIB, num_descriptors=80, num_threads=10, num_mappings=1100
)
noise = st.lists(st.integers(0, MIB), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES)


@pytest.mark.timeout(ENDS_WITHIN_S + 10)
def test_short_soak_goes_every_way_and_leaks_no_fd_or_thread() -> None:
    """Memory is another matter: what is taken once is large beside so few handoffs."""
    command = [sys.executable, "-m", "tests.tools.soak", "--minutes", "0.05"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
    )

    assert ended.stdout, ended.stderr
    *looks, found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert found.get("flat") is (ended.returncode == 0), ended.stdout + ended.stderr
    assert len(looks) == NUM_PERIODS
    assert looks[-1]["ended"].keys() >= {"mapped", "direct", "packed"}
    for name in ("prefill", *READERS):
        assert found["agents"][name]["num_handoffs"]
        assert found["agents"][name]["grows"].keys() <= {"other_bytes"}
        assert looks[-1]["agents"][name]["ended_bytes"]
        assert looks[-1]["agents"][name]["anonymous_bytes"] > MIB


@given(noise, st.integers(1, 10), st.sampled_from([(CAP_BYTES, 100), (1 << 40, 1000)]))
def test_bytes_left_by_handoffs_are_growth_but_full_caches_not(
    noise: list[int], times: int, caps: tuple[int, int]
) -> None:
    cap_bytes, least_bytes = caps
    leak_bytes, flat = times * least_bytes, _soaked(noise, cap_bytes)
    leaky = [
        replace(o, anonymous_bytes=o.anonymous_bytes + leak_bytes * o.num_handoffs) for o in flat
    ]

    assert judge(flat).are_caps_full is (cap_bytes == CAP_BYTES)
    assert not judge(flat).grows
    assert judge(leaky).grows.keys() == {"other_bytes"}
    assert judge(leaky).bytes_by_handoff == pytest.approx(leak_bytes, abs=20)


@pytest.mark.parametrize("name", sorted(LIMITS.keys() - {"other_bytes"}))
def test_what_is_left_behind_now_and_then_is_called_growth(name: str) -> None:
    leaky = [
        replace(one, **{name: getattr(one, name) + at * 3})
        for at, one in enumerate(_soaked([0] * NUM_SAMPLES, CAP_BYTES))
    ]

    assert judge(leaky).grows.keys() == {name}


def _soaked(noise: Sequence[int], cap_bytes: int) -> list[Sample]:
    """An agent without a leak: 400 bytes are kept of each handoff, up to the cap."""
    samples = []
    for at, some in enumerate(noise):
        kept = min(cap_bytes, 400 * at * STEP)
        samples.append(
            replace(
                START,
                num_handoffs=at * STEP,
                anonymous_bytes=START.anonymous_bytes + kept + some,
                ended_bytes=kept,
            )
        )
    return samples
