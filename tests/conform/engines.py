"""The engines that tests have conform check, and how long it waits for them."""

import sys
from pathlib import Path

from kvbus.conform.book import Outcome, Verdict
from kvbus.protocol import AgentRole

HERE = Path(__file__).parent


def raw_engine(role: AgentRole, *words: str) -> list[str]:
    """The command of an engine on bare sockets, with one flaw or none (""), and its allocator."""
    return [sys.executable, str(HERE / f"raw_{role}.py"), *words]


def named(outcomes: list[Outcome], verdict: Verdict) -> dict[str, list[str]]:
    """The rules of which this came, and what was seen of each."""
    return {one.name: one.seen for one in outcomes if one.verdict is verdict}
