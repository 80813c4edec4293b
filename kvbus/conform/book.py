"""Owns what was seen of each rule: how often it was looked at, and what was wrong."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from kvbus.conform.rules import RULES, Rule

MAX_SEEN = 3
PAGE = "docs/protocol.md"


class Verdict(StrEnum):
    """What came of a rule."""

    PASSED = "passed"
    FAILED = "failed"
    UNTRIED = "untried"


class Outcome(msgspec.Struct):
    """One rule, what came of it, and what was seen; ``page`` says where the rule stands."""

    name: str
    verdict: Verdict
    page: str
    rule: str
    num_looks: int
    num_wrong: int
    seen: list[str]


class Book:
    """What was seen, by the rule that it is about."""

    def __init__(self) -> None:
        self._looks: dict[str, int] = {}
        self._wrong: dict[str, list[str]] = {}
        self._untried: dict[str, str] = {}

    def expect(self, rule: str, holds: bool, seen: str) -> bool:
        """Take note of one look; ``seen`` says what was seen where it does not hold."""
        name = RULES[rule].name
        self._looks[name] = self._looks.get(name, 0) + 1
        if not holds:
            self._wrong.setdefault(name, []).append(seen)
        return holds

    def untried(self, rule: str, why: str) -> None:
        """Say why a rule could not be tried."""
        self._untried[RULES[rule].name] = why

    @property
    def num_wrong(self) -> int:
        """How much was wrong so far."""
        return sum(map(len, self._wrong.values()))

    def outcomes(self, rules: Iterable[Rule]) -> list[Outcome]:
        """What came of each of these rules."""
        return [self._outcome(rule) for rule in rules]

    def _outcome(self, rule: Rule) -> Outcome:
        looks, wrong = self._looks.get(rule.name, 0), self._wrong.get(rule.name, [])
        verdict = Verdict.FAILED if wrong else Verdict.PASSED if looks else Verdict.UNTRIED
        seen = list(dict.fromkeys(wrong))[:MAX_SEEN]
        if verdict is Verdict.UNTRIED:
            seen = [self._untried.get(rule.name, "nothing of it was seen")]
        page = f"{PAGE}#{rule.anchor}"
        return Outcome(rule.name, verdict, page, rule.text, looks, len(wrong), seen)
