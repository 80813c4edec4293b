"""What a fetch would take now, for routers; learned from fetches that have ended."""

from collections import OrderedDict

from kvbus.agent.engine import LocalEngine
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, LocalError
from kvbus.planning import Learned, SpanMap, held_bytes
from kvbus.protocol.engine import Fetched
from kvbus.protocol.status import Cost, Predicted
from kvbus_decode.reader import Reader
from kvbus_decode.route_book import RouteBook

MAX_LEARNED = 4096
MEETING_S = 0.1
"""What engines that have not met take for that."""


class CostBook:
    """What is known of each prefill agent and path, by the agent's endpoint."""

    def __init__(self, agent: Agent, routes: RouteBook, reader: Reader) -> None:
        self._agent, self._routes, self._reader = agent, routes, reader
        self._learned: OrderedDict[tuple[str, str], Learned] = OrderedDict()

    def observe(self, fetched: Fetched, endpoint: str) -> None:
        """A fetch from the agent there has completed: it teaches, unless it waited for tokens."""
        stages, key = fetched.stages_s, (endpoint, fetched.path)
        if stages.meeting or stages.waiting:
            return
        seconds = stages.queued + stages.claiming + stages.reading + stages.taking
        self._learned.setdefault(key, Learned()).observe(fetched.num_bytes, seconds)
        self._learned.move_to_end(key)
        if len(self._learned) > MAX_LEARNED:
            self._learned.popitem(last=False)

    def cost(self, asked: Cost) -> Predicted:
        """What a fetch would take now.

        Raises `LocalError` for an engine that is not here, and for tokens in the wrong order.
        """
        first, last = asked.first_token, asked.num_tokens
        if first > last:
            message = f"first_token {first} is behind num_tokens {last}"
            raise LocalError(message, field="first_token")
        engine = self._engine(asked.decode_engine)
        route = self._routes.between(asked.endpoint, asked.prefill_engine, engine)
        choice = self._reader.choose(route, first, last) if route else None
        path = choice.path.value if choice else ""
        learned = self._learned.get((asked.endpoint, path), Learned())
        num_bytes = _num_bytes(engine, first, last)
        return Predicted(
            predicted_s=learned.predict_s(num_bytes) + (0.0 if path else MEETING_S),
            num_bytes=num_bytes,
            decode_engine=engine.engine_id,
            path=path,
            num_observed=learned.num_observed,
        )

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


def _num_bytes(engine: LocalEngine, first_token: int, num_tokens: int) -> int:
    """Of these tokens, for the ranks of the engine that are here."""
    spans = SpanMap(engine.spec.groups, engine.spec.groups).whole(first_token, num_tokens)
    sizes = held_bytes((one.rank for one in engine.ranks.values()), engine.spec)
    return sum(size * (spans[group][1] - spans[group][0]) for group, size in sizes.items())
