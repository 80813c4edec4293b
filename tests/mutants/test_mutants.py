"""Every mutant can be applied to the code as it is, and names tests that are there."""

from pathlib import Path

import pytest

from tests.mutants.mutant import ROOT, Mutant, mutants


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_the_old_text_of_a_mutant_is_there_once_and_its_tests_exist(mutant: Mutant) -> None:
    assert mutant.changed(ROOT) != (ROOT / mutant.file).read_text(encoding="utf-8")
    for test in mutant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8")
        assert not name or f"def {name}(" in text


def test_a_mutant_of_code_that_has_changed_says_so(tmp_path: Path) -> None:
    mutant = Mutant("m", "nothing", "a.py", "old", "new", "")
    (tmp_path / "a.py").write_text("old old")

    with pytest.raises(ValueError, match=r"mutant m: .* a\.py 2 times"):
        mutant.changed(tmp_path)
