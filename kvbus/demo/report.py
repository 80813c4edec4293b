"""What came of the demo's requests, and the figures that sum it up.

Refuses to judge by tokens alone: an output matches when tokens and digests of all logits do.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from signal import Signals
from typing import Any

from kvbus.demo.messages import Decoded, Prefilled, Step
from kvbus.demo.options import DemoOptions
from kvbus.errors import RequestRefused


@dataclass(slots=True)
class Served:
    """One request: what the engines answered so far; ``failed`` is the last of it."""

    request_id: str
    prompt: str
    prefilled: Prefilled | None = None
    decoded: Decoded | None = None
    failed: RequestRefused | None = None

    @property
    def output(self) -> list[Step]:
        """The steps of both halves."""
        first = [self.prefilled.step] if self.prefilled else []
        return first + (self.decoded.steps if self.decoded else [])

    @property
    def after_prefill_s(self) -> float | None:
        """From the end of the prefill to the completion of the fetch; None before that."""
        if self.prefilled is None or self.decoded is None:
            return None
        return self.decoded.fetched_at_s - self.prefilled.computed_at_s


@dataclass(frozen=True, slots=True)
class Leaks:
    """What is still held when nothing runs any more: blocks by engine, offers, fetches."""

    prefill_blocks: int
    decode_blocks: int
    offers: int
    fetches: int

    @property
    def total(self) -> int:
        """All of it; 0 is the only good figure."""
        return self.prefill_blocks + self.decode_blocks + self.offers + self.fetches


@dataclass(slots=True)
class DemoReport:
    """A run, as far as it has come.

    ``alone`` are the steps of the model run alone, by prompt, ``leaks`` None until they are
    counted. ``trouble`` says what ended the run early, or what did not end well; ``ended_by`` is
    the signal that did.
    """

    options: DemoOptions
    served: list[Served] = field(default_factory=list)
    alone: dict[str, list[Step]] = field(default_factory=dict)
    leaks: Leaks | None = None
    trouble: list[str] = field(default_factory=list)
    ended_by: Signals | None = None

    def matches(self, served: Served) -> bool:
        """Whether this output equals that of the model run alone."""
        return served.decoded is not None and served.output == self.alone.get(served.prompt)

    @property
    def num_matched(self) -> int:
        """How many outputs match."""
        return sum(map(self.matches, self.served))

    @property
    def not_compared(self) -> set[str]:
        """Prompts with an output that the model run alone is needed for."""
        completed = {one.prompt for one in self.served if one.decoded is not None}
        return completed - self.alone.keys()

    @property
    def handoffs(self) -> list[Decoded]:
        """The requests whose fetch completed."""
        return [served.decoded for served in self.served if served.decoded is not None]

    @property
    def failures(self) -> Counter[str]:
        """How many requests failed, by ``code: message``."""
        failed = (served.failed for served in self.served)
        return Counter(f"{one.code}: {one.message}" for one in failed if one is not None)

    @property
    def num_unfinished(self) -> int:
        """How many requests have neither an output nor failed."""
        return self.options.requests - len(self.handoffs) - self.failures.total()

    @property
    def ok(self) -> bool:
        """All outputs match, nothing is leaked, and nothing went wrong."""
        is_whole = self.num_matched == self.options.requests and not self.trouble
        return is_whole and self.leaks is not None and not self.leaks.total

    def summary(self) -> dict[str, Any]:
        """The figures for ``--json``; ``leaked_blocks`` is null in a run that ended early."""
        options, handoffs = self.options, self.handoffs
        after_prefill = (served.after_prefill_s for served in self.served)
        return {
            "requests": options.requests,
            "matched": self.num_matched,
            "failed": self.failures.total(),
            "failures": self.failures,
            "unfinished": self.num_unfinished,
            "trouble": self.trouble,
            "bytes": sum(handoff.num_bytes for handoff in handoffs),
            "handoff_ms": _quantiles_ms([one.handoff_s for one in handoffs]),
            "after_prefill_ms": _quantiles_ms([s for s in after_prefill if s is not None]),
            "paths": Counter(handoff.path for handoff in handoffs),
            "leaked_blocks": self.leaks.total if self.leaks is not None else None,
            "prefill": asdict(options.shape("prefill")),
            "decode": asdict(options.shape("decode")),
            "model": options.model.varied(),
            "path": options.path,
            "prefill_chunk": options.prefill_chunk,
            "ring_share": options.share_in_ring,
        }


def _quantiles_ms(times_s: Sequence[float]) -> dict[str, float | None]:
    """The nearest ranks of p50 and p99; None of none."""
    ordered = sorted(times_s)
    return {
        name: round(ordered[math.ceil(quantile * len(ordered)) - 1] * 1e3, 3) if ordered else None
        for name, quantile in (("p50", 0.5), ("p99", 0.99))
    }
