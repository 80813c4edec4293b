"""Runs are copied to the byte, by the kernel in C, by numpy and one by one, wherever they lie."""

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hatch_build
from kvbus.memory import libc, run_copy
from kvbus.planning import Lattice, Runs
from tests.unit.memory.conftest import HAS_COMPILER
from tests.unit.memory.in_memory import InMemory, plan_between
from tests.unit.planning.handoffs import Case, cases, copied_by_loops, some

Copy = Callable[[Runs], None]
ZERO = np.zeros((2, 1), np.int64)


def copy_lattices(copy_one: Callable[[Lattice], None], runs: Runs) -> None:
    for lattice in runs.lattices:
        copy_one(lattice)
    run_copy.copy_runs(Runs(few=runs.few))


@pytest.fixture(scope="module", params=["library", "library_without_avx", "numpy", "one by one"])
def copy(request: pytest.FixtureRequest) -> Copy:
    if request.param.startswith("library"):
        kernel = run_copy.load_kernel(request.getfixturevalue(request.param))
        assert kernel is not None
        return partial(copy_lattices, partial(run_copy.copy_by_kernel, kernel))
    if request.param == "numpy":
        return partial(copy_lattices, run_copy.copy_by_numpy)
    return lambda runs: run_copy.copy_runs(Runs(few=tuple(runs)))


@some(200)
@given(cases(), st.integers(1, 200))
def test_runs_are_copied_like_loops(copy: Copy, case: Case, job_bytes: int) -> None:
    prefill, decode = InMemory(case.prefill), InMemory(case.decode)
    runs = plan_between(case, prefill, decode).runs(*case.tables, case.spans())
    for job in runs.cut(job_bytes):
        copy(job)
    assert decode.content() == copied_by_loops(case)[0]


@some(200)
@given(
    run_bytes=st.integers(1, 300) | st.integers(1, 9000),
    gap=st.sampled_from([0, 0, 1, 64, 100]),
    places=st.integers(1, 6).flatmap(lambda num: st.permutations(range(num))),
    starts=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    within_units=st.booleans(),
)
def test_runs_of_any_length_and_alignment_are_copied_exactly(
    copy: Copy,
    *,
    run_bytes: int,
    gap: int,
    places: list[int],
    starts: tuple[int, int],
    within_units: bool,
) -> None:
    """Source and target in other orders; without a gap some are neighbours on both sides."""
    size_bytes = len(places) * (run_bytes + gap)
    source = np.random.default_rng(gap).integers(0, 256, size_bytes + 400, np.uint8)
    target = np.full(size_bytes + 400, 7, np.uint8)
    expected = target.copy()
    offsets = np.array([places, range(len(places))], np.int64) * (run_bytes + gap)
    for out_of, to in (offsets.T + starts).tolist():
        expected[to : to + run_bytes] = source[out_of : out_of + run_bytes]
    addresses = np.array([[source.ctypes.data + starts[0]], [target.ctypes.data + starts[1]]])
    units, inner = (ZERO, offsets) if within_units else (offsets, ZERO)
    copy(Runs(lattices=(Lattice(addresses, units, inner, run_bytes),)))
    assert (target == expected).all()


def test_long_runs_are_copied_between_places_far_apart(copy: Copy) -> None:
    """One is where the kernel puts mappings, one 2**46 bytes below, as the heap is."""
    size_bytes, low = 1 << 20, 1 << 40
    area, target = np.full(size_bytes, 3, np.uint8), np.zeros(2 * size_bytes, np.uint8)
    at = target.ctypes.data
    libc.map_zeros_over(low, size_bytes)
    try:
        ctypes.memset(low, 5, size_bytes)
        places = np.array([[low, area.ctypes.data], [at, at + size_bytes]])
        copy(Runs(lattices=(Lattice(places, ZERO, ZERO, size_bytes),)))
    finally:
        libc.unmap(low, size_bytes)
    assert (target.reshape(2, -1) == [[5], [3]]).all()


@pytest.mark.parametrize("num_bytes", [1, run_copy.STREAMED_BYTES - 1, 5 * run_copy.STREAMED_BYTES])
def test_a_single_run_of_any_length_is_copied_and_nothing_else(num_bytes: int) -> None:
    source = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    target = np.full(num_bytes + 14, 7, np.uint8)
    expected = np.concatenate([target[:7], source, target[:7]])
    run_copy.copy_runs(Runs(few=((target.ctypes.data + 7, source.ctypes.data, num_bytes),)))
    assert np.array_equal(target, expected)


def test_without_a_library_numpy_copies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    source, target = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    at = np.array([[source.ctypes.data], [target.ctypes.data]])
    monkeypatch.setattr(run_copy, "_kernel", run_copy.load_kernel(tmp_path / "none.so"))
    run_copy.copy_runs(Runs(lattices=(Lattice(at, ZERO, ZERO, 8),)))
    assert not run_copy.is_compiled()
    assert run_copy.load_kernel(tmp_path / "text.so") is None
    assert (target == source).all()


@pytest.mark.skipif(not HAS_COMPILER, reason="there is no C compiler here")
def test_wheel_gets_kernel_of_other_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = tmp_path / "beside the sources.so"
    monkeypatch.setattr(hatch_build, "LIBRARY", Path(hatch_build.__file__).with_name(beside.name))
    wheel: dict[str, Any] = {"force_include": {}}
    problem = hatch_build.add_kernel("standard", wheel, tmp_path)
    assert problem is None
    assert wheel["force_include"] == {str(tmp_path / beside.name): beside.name}
    assert not wheel["pure_python"]
    assert not hatch_build.LIBRARY.exists()


def test_build_goes_on_without_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    library = tmp_path / "copy_runs.so"
    library.write_text("of an earlier build")
    problem = hatch_build.compile_kernel(library)
    assert problem is not None
    assert "no-such-compiler" in problem
    assert "install a C compiler" in hatch_build.told(problem)
    assert list(tmp_path.iterdir()) == []
