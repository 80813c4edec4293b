"""What came of the demo's requests, and the figures that sum it up.

Refuses to judge by tokens alone: an output matches when tokens and digests of all logits do.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbus.demo.options import DemoOptions
from kvbus.demo.step import Step
from kvbus.demo.work import Decoded, Failed, Prefilled


@dataclass(frozen=True, slots=True)
class Served:
    """One request: what the engines answered; ``failed`` is the one of them that did not work."""

    request_id: str
    prompt: str
    prefilled: Prefilled | None = None
    decoded: Decoded | None = None
    failed: Failed | None = None

    @property
    def output(self) -> list[Step]:
        """The steps of both halves."""
        first = [self.prefilled.step] if self.prefilled else []
        return first + (self.decoded.steps if self.decoded else [])


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


@dataclass(frozen=True, slots=True)
class DemoReport:
    """A whole run; ``alone`` are the steps of the model run alone, by prompt."""

    options: DemoOptions
    served: Sequence[Served]
    alone: Mapping[str, Sequence[Step]]
    leaks: Leaks

    def matches(self, served: Served) -> bool:
        """Whether this output equals that of the model run alone."""
        return served.decoded is not None and served.output == list(self.alone[served.prompt])

    @property
    def num_matched(self) -> int:
        """How many outputs match."""
        return sum(map(self.matches, self.served))

    @property
    def handoffs(self) -> list[Decoded]:
        """The requests whose fetch completed."""
        return [served.decoded for served in self.served if served.decoded is not None]

    @property
    def after_prefill_s(self) -> list[float]:
        """From the end of a prefill to the completion of its fetch, of each that completed."""
        return [
            served.decoded.fetched_at_s - served.prefilled.computed_at_s
            for served in self.served
            if served.decoded is not None and served.prefilled is not None
        ]

    @property
    def failures(self) -> Counter[str]:
        """How many requests failed, by ``code: message``."""
        failed = (served.failed for served in self.served)
        return Counter(f"{one.code}: {one.message}" for one in failed if one is not None)

    @property
    def ok(self) -> bool:
        """All outputs match and nothing is leaked."""
        return self.num_matched == len(self.served) and not self.leaks.total

    def summary(self) -> dict[str, Any]:
        """The figures for ``--json``."""
        return {
            "requests": len(self.served),
            "matched": self.num_matched,
            "failed": self.failures.total(),
            "failures": dict(self.failures),
            "bytes": sum(handoff.num_bytes for handoff in self.handoffs),
            "handoff_ms": _quantiles_ms([one.handoff_s for one in self.handoffs]),
            "after_prefill_ms": _quantiles_ms(self.after_prefill_s),
            "paths": dict(Counter(handoff.path for handoff in self.handoffs)),
            "leaked_blocks": self.leaks.total,
            "prefill": asdict(self.options.prefill),
            "decode": asdict(self.options.decode),
            "model": asdict(self.options.model),
            "path": self.options.path,
            "prefill_chunk": self.options.prefill_chunk,
            "ring_share": self.options.ring_share,
        }


def _quantiles_ms(times_s: Sequence[float]) -> dict[str, float | None]:
    """The nearest ranks of p50 and p99; None of none."""
    ordered = sorted(times_s)
    return {
        name: round(ordered[math.ceil(quantile * len(ordered)) - 1] * 1e3, 3) if ordered else None
        for name, quantile in (("p50", 0.5), ("p99", 0.99))
    }
