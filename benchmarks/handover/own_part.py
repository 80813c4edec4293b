"""kvbus' own part of a handover, out of the agents' spans and the stamps of the connector.

    after    begun: vLLM's scheduler has blocks for the request, and the connector asks for the load
    beside   published: vLLM's scheduler has the last step of the prompt, and the connector seals
    both     heard: the load has ended in the process of the decode engine
             told: the connector has told vLLM, which it is asked for in steps alone

The part is all from *begun* or *published* until *told*, and what the connector did before when the
decode request came (*noted*). HTTP, vLLM's steps before and the step that makes the token are in no
part. All is on one machine, and so on one clock.
"""

import http.client
import json
import time
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from kvbus.bench.pairs import BenchAgent

from .client import Prefilled, Streamed

STAMPS = "HANDOVER_STAMPS"
"""The variable that names the file of the stamps."""
NOTED, BEGUN, HEARD, TOLD, PUBLISHED = "noted", "begun", "heard", "told", "published"
AFTER, BESIDE = "after", "beside"
COPIES = 15
TARGETS_MS = {AFTER: 8.0, BESIDE: 2.0}
NEEDED = {AFTER: {NOTED, BEGUN, HEARD, TOLD}, BESIDE: {PUBLISHED, HEARD, TOLD}}


class Stamp(NamedTuple):
    """A call of the connector."""

    start_s: float
    end_s: float


@dataclass(slots=True)
class OwnParts:
    """Milliseconds of each part of each handover, by kind; ``stamps`` is the connectors' file."""

    agents: tuple[BenchAgent, ...]
    stamps: Path
    parts: dict[str, list[dict[str, float]]] = field(
        default_factory=lambda: {AFTER: [], BESIDE: []}
    )

    def add(self, kind: str, prefilled: Prefilled, streamed: Streamed) -> None:
        """A handover; nothing else was done from its first request to its first token."""
        sent_s = prefilled.received_s if kind == AFTER else prefilled.sent_s
        seen = self._between(sent_s, streamed.at_s[0])
        if missing := NEEDED[kind] - seen.keys():
            raise SystemExit(f"error: a handover {kind} the prefill was not {', '.join(missing)}")
        start_s = seen[BEGUN if kind == AFTER else PUBLISHED].start_s
        heard_s, told_s = seen[HEARD].end_s, seen[TOLD].end_s
        noted_s = seen[NOTED].end_s - seen[NOTED].start_s if kind == AFTER else 0.0
        parts = defaultdict(float, {NOTED: noted_s} if noted_s else {})
        at_s = start_s
        name = (prefilled.kv_transfer_params or {})["ticket"]["request_id"]
        if kind == BESIDE:
            offer = _spans(self.agents[0], name)
            at_s = next(span["start_s"] for span in offer if span["name"] == "sealed")
            parts["until sealed"] = at_s - start_s
        for span in _spans(self.agents[-1], name):
            if span["depth"] == 1 and span["end_s"] > start_s:
                parts[span["name"]] += span["end_s"] - max(at_s, span["start_s"])
                at_s = span["end_s"]
        parts |= {"until heard": heard_s - at_s, "until told": told_s - heard_s}
        whole = {"all": told_s - start_s + noted_s, "all, until heard": heard_s - start_s + noted_s}
        self.parts[kind].append({name: s * 1e3 for name, s in (parts | whole).items()})

    def lines(self) -> list[str]:
        """Medians."""
        lines = []
        for kind, each in self.parts.items():
            names = list(dict.fromkeys(name for one in each for name in one))
            p50 = {name: median(one.get(name, 0.0) for one in each) for name in names}
            whole, heard = p50.pop("all"), p50.pop("all, until heard")
            verdict = "met" if whole <= TARGETS_MS[kind] else "MISSED"
            lines += [
                f"kvbus' own part {kind} the prefill: p50 {whole:.1f} ms, {heard:.1f} until heard, "
                f"target {TARGETS_MS[kind]:g}: {verdict}",
                "  " + ", ".join(f"{name} {ms:.2f}" for name, ms in p50.items()),
            ]
        return lines

    def _between(self, sent_s: float, token_s: float) -> dict[str, Stamp]:
        """The first stamp of each kind of call that began in between."""
        seen: dict[str, Stamp] = {}
        for line in self.stamps.read_text(encoding="ascii").splitlines():
            what, start, end = line.split()
            if sent_s <= float(start) <= token_s:
                seen.setdefault(what, Stamp(float(start), float(end)))
        return seen


def copy_ms(num_bytes: int) -> float:
    """Of as many bytes, by one thread of a process that has the machine for itself."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    took_s = []
    for _ in range(COPIES):
        start_s = time.perf_counter()
        target[:] = source
        took_s.append(time.perf_counter() - start_s)
    return median(took_s) * 1e3


def _spans(agent: BenchAgent, name: str) -> list[dict[str, Any]]:
    """What the agent tells of a request, by time."""
    connection = http.client.HTTPConnection("127.0.0.1", agent.metrics_port, timeout=10)
    with closing(connection):
        connection.request("GET", f"/trace?id={name}")
        spans: list[dict[str, Any]] = json.loads(connection.getresponse().read())["spans"]
    return sorted(spans, key=lambda span: span["start_s"])
