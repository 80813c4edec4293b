"""A mutant: a change of the product that breaks a promise, and the tests that must see it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).parents[3]
DATA = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Edit:
    """``old`` text of ``file``, which is there exactly once, becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """Each of ``tests``, by pytest's names, fails with the edits."""

    name: str
    breaks: str
    tests: Sequence[str]
    edit: Sequence[Edit]

    def changed(self, root: Path) -> dict[str, str]:
        """The new text of each file; raises `ValueError` that says what to do."""
        texts: dict[str, str] = {}
        for edit in self.edit:
            text = texts.get(edit.file) or (root / edit.file).read_text(encoding="utf-8")
            if (number := text.count(edit.old)) != 1:
                raise ValueError(
                    f"mutant {self.name}: its old text is in {edit.file} {number} times, not once: "
                    f"the code has changed, write the mutant again in {DATA.relative_to(ROOT)}:\n"
                    f"{edit.old}"
                )
            texts[edit.file] = text.replace(edit.old, edit.new)
        return texts


def mutants() -> list[Mutant]:
    return msgspec.toml.decode(DATA.read_bytes(), type=dict[str, list[Mutant]])["mutant"]
