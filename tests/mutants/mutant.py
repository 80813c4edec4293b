"""A mutant: one change of the product that breaks a promise, and the test that must see it.

Refuses to be applied where its old text is not there exactly once: the code has moved on.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DATA = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """``old`` text of ``file`` becomes ``new``; ``test`` is a name that pytest takes.

    ``in_place_of_chaos`` is another one, where a chaos run cannot see it.
    """

    name: str
    breaks: str
    file: str
    old: str
    new: str
    test: str
    in_place_of_chaos: str = ""

    @property
    def tests(self) -> list[str]:
        """All that it names."""
        return [name for name in (self.test, self.in_place_of_chaos) if name]

    def changed(self, root: Path) -> str:
        """The file with the change; raises `ValueError` that says what to do."""
        text = (root / self.file).read_text(encoding="utf-8")
        if (number := text.count(self.old)) != 1:
            raise ValueError(
                f"mutant {self.name}: its old text is in {self.file} {number} times, not once: the "
                f"code has changed, write the mutant anew in {DATA.relative_to(ROOT)}"
            )
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of them."""
    return [Mutant(**fields) for fields in tomllib.loads(DATA.read_text("utf-8"))["mutant"]]
