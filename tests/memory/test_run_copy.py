"""Runs are copied to the byte, by the kernel in C and by numpy, wherever they lie."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hatch_build
from kvbus.memory import run_copy
from kvbus.planning import Copies, cut_copies, direct
from tests.memory.conftest import HAS_COMPILER
from tests.planning.handoffs import Case, cases, copied_by_loops, some

EXAMPLES = some(200)
Copy = Callable[[Iterable[Copies]], None]


@pytest.fixture(scope="session", params=["kernel", "numpy"])
def copy(request: pytest.FixtureRequest) -> Copy:
    if request.param == "kernel":
        kernel = run_copy.load_kernel(request.getfixturevalue("library"))
        assert kernel is not None
        by: Callable[[Copies], None] = partial(run_copy.copy_by_kernel, kernel)
    else:
        by = run_copy.copy_by_numpy

    def copy_all(job: Iterable[Copies]) -> None:
        for one in job:
            by(one)

    return copy_all


def placed_at(one: Copies, source: int, target: int) -> Copies:
    """The copies with addresses that are so much further on."""
    return replace(one, outer=one.outer + np.array([[source], [target]]))


@EXAMPLES
@given(cases(), st.integers(1, 200))
def test_what_loops_over_every_element_copy_is_copied(
    copy: Copy, case: Case, job_bytes: int
) -> None:
    prefill = np.frombuffer(case.prefill.memory, np.uint8)
    decode = np.frombuffer(case.decode.memory, np.uint8).copy()
    moved = prefill.ctypes.data - case.prefill.base, decode.ctypes.data - case.decode.base

    for job in cut_copies(case.copies(), job_bytes=job_bytes):
        copy([placed_at(one, *moved) for one in job])

    assert decode.tobytes() == copied_by_loops(case)[0]


@EXAMPLES
@given(cases())
def test_few_runs_copy_what_loops_over_every_element_copy(case: Case) -> None:
    prefill = np.frombuffer(case.prefill.memory, np.uint8)
    decode = np.frombuffer(case.decode.memory, np.uint8).copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "MAX_RUNS", 1 << 30)
        runs = case.plan().few_runs(*case.tables, case.spans())
    assert runs is not None
    to, out_of = decode.ctypes.data - case.decode.base, prefill.ctypes.data - case.prefill.base

    run_copy.copy_few_runs((target + to, source + out_of, n) for target, source, n in runs)

    assert decode.tobytes() == copied_by_loops(case)[0]


@st.composite
def lattices(draw: st.DrawFn) -> Copies:
    """Runs of up to some pages that lie anywhere, targets apart; some are neighbours."""
    run_bytes = draw(st.integers(1, 300) | st.integers(1, 9000))
    width, rows = run_bytes, []
    for _ in range(3):
        num, gap = draw(st.integers(1, 4)), draw(st.sampled_from([0, 0, 1, 64, 100]))
        places = draw(st.permutations(range(num)))
        target = [place * (width + gap) for place in places]
        elsewhere = st.lists(st.integers(0, 20_000), min_size=num, max_size=num)
        rows.append(np.array([draw(st.just(target) | elsewhere), target], dtype=np.int64))
        width = num * (width + gap)
    return Copies(rows[2], rows[1], rows[0], run_bytes)


@EXAMPLES
@given(lattices(), st.integers(0, 200), st.integers(0, 200))
def test_runs_of_any_length_and_alignment_are_copied_and_nothing_else(
    copy: Copy, one: Copies, source_at: int, target_at: int
) -> None:
    source_ends, target_ends = (side.max() + one.run_bytes for side in one.addresses())
    source = np.random.default_rng(one.run_bytes).integers(0, 256, source_ends + 400, np.uint8)
    target = np.full(target_ends + 400, 7, np.uint8)
    expected = target.copy()
    for out_of, to in placed_at(one, source_at, target_at).addresses().T.tolist():
        expected[to : to + one.run_bytes] = source[out_of : out_of + one.run_bytes]

    copy([placed_at(one, source.ctypes.data + source_at, target.ctypes.data + target_at)])

    assert (target == expected).all()


def test_a_job_of_nothing_copies_nothing(copy: Copy) -> None:
    none, one = np.empty((2, 0), np.int64), np.zeros((2, 1), np.int64)

    copy([])
    copy([Copies(none, one, one, 8), Copies(one, none, one, 8)])


def test_without_a_library_numpy_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    zero = np.zeros((2, 1), np.int64)
    at = np.array([[source.ctypes.data], [target.ctypes.data]])
    monkeypatch.setattr(run_copy, "_kernel", run_copy.load_kernel(tmp_path / "none.so"))

    run_copy.copy_runs([Copies(at, zero, zero, 8)])

    assert not run_copy.is_compiled()
    assert run_copy.load_kernel(tmp_path / "text.so") is None
    assert (target == source).all()


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler here")
def test_a_wheel_gets_its_kernel_from_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    beside = tmp_path / "beside the sources.so"
    monkeypatch.setattr(hatch_build, "LIBRARY", Path(hatch_build.__file__).with_name(beside.name))
    wheel: dict[str, Any] = {"force_include": {}}

    problem = hatch_build.add_kernel("standard", wheel, tmp_path)

    assert problem is None
    assert wheel["force_include"] == {str(tmp_path / beside.name): beside.name}
    assert not wheel["pure_python"]
    assert not hatch_build.LIBRARY.exists()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_a_build_without_a_compiler_goes_on_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    library = tmp_path / "copy_runs.so"
    library.write_text("of an earlier build")

    problem = hatch_build.compile_kernel(library)

    assert problem is not None
    assert compiler in problem
    assert "install a C compiler" in hatch_build.told(problem)
    assert list(tmp_path.iterdir()) == []
