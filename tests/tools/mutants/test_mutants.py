"""Every mutant can be applied to the code as it is, and names tests that are there."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.tools.mutants.mutant import ROOT, Edit, Mutant, mutants

pytestmark = pytest.mark.long  # `make mutants` looks, too: product text may change freely


@cache
def names_in(file: str) -> set[str]:
    """The names by which pytest takes what is at the top of a file, or in a class there."""
    names = set()
    for node in ast.parse((ROOT / file).read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name, body=body):
                functions = (one for one in body if isinstance(one, ast.FunctionDef))
                names |= {name} | {f"{name}::{one.name}" for one in functions}
            case ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    return names


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_each_edit_of_a_mutant_can_be_made_and_its_tests_exist(mutant: Mutant) -> None:
    changed = mutant.changed(ROOT)

    assert all(text != (ROOT / file).read_text("utf-8") for file, text in changed.items())
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in names_in(file), test


def test_no_two_mutants_have_one_name() -> None:
    names = [mutant.name for mutant in mutants()]

    assert len(names) == len(set(names))


def test_a_mutant_of_code_that_has_changed_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("old old")
    mutant = Mutant("m", "nothing", [], [Edit("a.py", "old", "new")])

    with pytest.raises(ValueError, match=r"mutant m: .* a\.py 2 times"):
        mutant.changed(tmp_path)
