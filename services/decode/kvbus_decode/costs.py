"""What a fetch would take now, for who chooses between engines; learned from fetches that ended.

Refuses to choose: paths, turns and routes are not changed by what is known here.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvbus.agent.engines.local_engine import LocalEngine
from kvbus.agent.process.service import Agent
from kvbus.errors import ErrorCode, LocalError
from kvbus.planning import Path, Rates, chunk_spans
from kvbus.planning.handoff_times import HandoffTimes, queue_s
from kvbus.protocol.cost import Cost, CostEvent, Predicted
from kvbus_decode.active import ActiveFetch
from kvbus_decode.fetch import events as ev
from kvbus_decode.peer.lease_client import LeaseClient
from kvbus_decode.peer.route import position_bytes
from kvbus_decode.read.reader import Reader

MAX_PAIRS, MAX_LOOKED_AT = 4096, 256
MEETING_S = 0.1
"""What engines that have not met take for that."""
UNMET_BYTES_PER_S = 3e9
PUBLISHED_BYTES = 64 << 20
CHANGED, LEAST_PAUSE_S = 1.25, 1.0


class Pair(NamedTuple):
    """A prefill engine, by its agent's endpoint, and a decode engine of ours."""

    endpoint: str
    prefill_engine: str
    decode_engine: str


@dataclass(slots=True)
class _Learned:
    """Of one pair, by path; ``path`` is the last one that was taken."""

    times: dict[str, HandoffTimes] = field(default_factory=dict)
    path: str = ""
    observed_at: float | None = None
    told: tuple[float, float] = (0.0, 0.0)
    told_at: float = float("-inf")


class CostBook:
    """Of one agent."""

    def __init__(self, agent: Agent, leases: LeaseClient, reader: Reader) -> None:
        self._agent, self._reader = agent, reader
        self._routes, self._peers = leases.routes, leases.peers
        self._active: Mapping[str, ActiveFetch] = leases.active
        self._pairs: OrderedDict[Pair, _Learned] = OrderedDict()
        self._sizes: dict[str, Counter[str]] = {}
        """Bytes of one position, by group, of an engine by its memory id."""

    def forget(self, engine: LocalEngine) -> None:
        """An engine is gone; what was learned of it is kept for the next of its name."""
        self._sizes.pop(engine.memory_id, None)

    def observe(self, fetched: ev.ReportFetched, fetch: ActiveFetch) -> None:
        """A fetch has ended: what it took is learned where it was alone and waited for nobody."""
        stages = fetched.stages_s
        if fetched.error is not None or stages.meeting or stages.waiting or not fetch.was_alone:
            return
        ticket, now = fetch.requested.ticket, self._agent.loop.time()
        pair = Pair(ticket.endpoint, ticket.engine_id, fetched.engine_id)
        seconds = stages.queued + stages.claiming + stages.reading + stages.confirming
        learned = self._learned(pair, fetched.path)
        learned.times[fetched.path].observe(fetched.num_bytes, seconds)
        learned.observed_at = now
        if now >= learned.told_at + LEAST_PAUSE_S:
            self._publish(pair, learned, fetch.engine)

    def cost(self, asked: Cost, queued: Collection[str]) -> Predicted:
        """What a fetch would take beside others, those ``queued`` first; raises `LocalError`."""
        engine, first, last = self._engine(asked.decode_engine), asked.first_token, asked.num_tokens
        if first > last:
            raise LocalError(
                f"first_token {first} is behind num_tokens {last}", field="first_token"
            )
        route = self._routes.between(asked.endpoint, asked.prefill_engine, engine)
        path = self._reader.path_of(route, first, last) if route else None
        theirs = route.prefill.engine_id if route else asked.prefill_engine
        pair = Pair(asked.endpoint, theirs, engine.engine_id)
        learned = self._pairs.get(pair) or _Learned()
        times = self._times(learned, path.value if path else "")
        num_bytes = self._num_bytes(engine, first, last)
        waits_s = self._queue_s(num_bytes, queued)
        # Reads by other agents are taken to be as large as this one.
        waits_s += self._peers.num_reads_elsewhere(asked.endpoint) * times.moving_s(num_bytes)
        since = learned.observed_at
        return Predicted(
            predicted_s=times.predict_s(num_bytes) + waits_s + (0.0 if path else MEETING_S),
            queue_s=waits_s,
            num_bytes=num_bytes,
            decode_engine=engine.engine_id,
            path=path.value if path else "",
            num_observed=times.num_observed,
            observed_s_ago=None if since is None else self._agent.loop.time() - since,
        )

    def _queue_s(self, num_bytes: int, queued: Collection[str]) -> float:
        """Of those that read, half is left; of very many some are looked at."""
        looked_at = list(islice(self._active.values(), MAX_LOOKED_AT))
        others = []
        for fetch in looked_at:
            requested, is_queued = fetch.requested, fetch.fetch_id in queued
            ticket = requested.ticket
            pair = Pair(ticket.endpoint, ticket.engine_id, requested.engine_id)
            learned = self._pairs.get(pair) or _Learned()
            size = self._num_bytes(fetch.engine, requested.first_token, requested.num_tokens)
            left = size if is_queued else size // 2
            others.append((self._times(learned, learned.path), left, is_queued))
        if not looked_at:
            return 0.0
        return queue_s(num_bytes, others) * len(self._active) / len(looked_at)

    def _engine(self, wanted: str) -> LocalEngine:
        if wanted:
            return self._agent.engines.engine(wanted)
        engines = [one for one in self._agent.engines.engines.values() if one.ready]
        if len(engines) != 1:
            raise LocalError(
                f"{len(engines)} engines are ready here: name one (decode_engine)",
                code=ErrorCode.ENGINE_UNKNOWN,
                field="decode_engine",
            )
        return engines[0]

    def _learned(self, pair: Pair, path: str) -> _Learned:
        """What is known of the pair, with times for ``path``, kept from now on."""
        learned = self._pairs.setdefault(pair, _Learned())
        self._pairs.move_to_end(pair)
        while len(self._pairs) > MAX_PAIRS:
            self._pairs.popitem(last=False)
        learned.path = path
        learned.times.setdefault(path, self._times(learned, path))
        return learned

    def _times(self, learned: _Learned, path: str) -> HandoffTimes:
        """Those of the path, or what is assumed of it."""
        known = learned.times.get(path)
        return known or HandoffTimes(bytes_per_s=_assumed(path, self._reader.rates))

    def _num_bytes(self, engine: LocalEngine, first_token: int, num_tokens: int) -> int:
        """Of these tokens, for the ranks of the engine that are here."""
        whole = first_token, num_tokens
        groups = engine.spec.groups
        spans = chunk_spans(groups, groups, whole, whole, last=True)
        each = self._position_bytes(engine)
        return sum(num * (spans[group][1] - spans[group][0]) for group, num in each.items())

    def _position_bytes(self, engine: LocalEngine) -> Counter[str]:
        known = self._sizes.get(engine.memory_id)
        if known is None:
            known = self._sizes[engine.memory_id] = position_bytes(engine.placed())
        return known

    def _publish(self, pair: Pair, learned: _Learned, engine: LocalEngine) -> None:
        """Tell watchers what has become another by much."""
        line = learned.times[learned.path].line(PUBLISHED_BYTES)
        if any(
            max(one, other) > CHANGED * min(one, other)
            for one, other in zip(line, learned.told, strict=True)
        ):
            learned.told, learned.told_at = line, self._agent.loop.time()
            token_bytes = sum(self._position_bytes(engine).values())
            event = CostEvent(*pair, token_bytes, *line)
            self._agent.publisher.publish("cost.changed", event)


def _assumed(path: str, rates: Rates) -> float:
    if path == Path.MAPPED.value:
        return rates.copy_bytes_per_s
    return rates.wire_bytes_per_s if path else UNMET_BYTES_PER_S
