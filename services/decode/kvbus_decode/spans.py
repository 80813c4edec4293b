"""What the decode agent remembers of fetches, as spans: the stages of each, and the legs in them.

Refuses to record anything: all of it comes out of the stories of the tables.
"""

from collections.abc import Callable, Hashable
from functools import partial

from kvbus.protocol.trace import OtherAgent, Remembered, Span, Trace
from kvbus.protocol.traceparent import trace_attributes
from kvbus.table import Story
from kvbus.table.spans import (
    Reading,
    forgotten_span,
    last_end,
    nested,
    pending_span,
    state_spans,
    way_spans,
)
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.entry import FetchEntry
from kvbus_decode.fetch.state import ENDS
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.read.leg import LegState

STAGES = Reading(ends=ENDS, cuts=(ev.ReadChunk,))
LEGS = Reading(
    ends=(LegState.OVER,),
    names={
        ("", LegState.READING): "READ",
        (LegState.PACKING, LegState.READING): "READ",
        (LegState.PACKED, LegState.READING): "READ",
        (LegState.READING, LegState.COPYING): "scattering",
    },
)
StoryOf = Callable[[Hashable], Story | None]


class FetchSpans:
    """The fetches of ``table``, and the reads of which ``reads`` has the stories, by key.

    ``for_others`` has those of reads for other agents, by what these call their fetch.
    """

    def __init__(
        self, table: FetchTable, reads: StoryOf, for_others: Callable[[str], list[Story]]
    ) -> None:
        self._table, self._reads, self._for_others = table, reads, for_others

    def remembered(self, asked: Trace) -> Remembered:
        """The fetches that are asked for, and what is read here for a fetch of another agent."""
        fetches = self._found(asked)
        entries = [self.of(fetch) for fetch in fetches]
        for reads in self._for_others(asked.fetch_id):
            legs = _leg_spans(reads, depth=0)
            entries += [legs] if legs else []
        tickets = [fetch.requested.ticket for fetch in fetches]
        others = {OtherAgent(ticket.endpoint, ticket.server_key): None for ticket in tickets}
        return Remembered(tuple(map(tuple, entries)), tuple(others))

    def recent(self, number: int) -> list[Callable[[], list[Span]]]:
        """What makes the spans of the newest fetches, in any thread; live ones come first."""
        newest = self._table.newest(number)
        return [self.later(one) if one.is_over else partial(list, self.of(one)) for one in newest]

    def of(self, fetch: FetchEntry) -> list[Span]:
        """One fetch: itself, its stages, below each the legs that began in it; its wait before."""
        return self.later(fetch)()

    def later(self, fetch: FetchEntry) -> Callable[[], list[Span]]:
        """`of`, to be called in any thread when the fetch has ended; no table is asked then."""
        return partial(_spans, fetch, self._reads(fetch.key))

    def _found(self, asked: Trace) -> list[FetchEntry]:
        found = self._table.named(asked.request_id)
        known = {fetch.key for fetch in found}
        return found + [one for one in self._table.called(asked.fetch_id) if one.key not in known]


def _spans(fetch: FetchEntry, reads: Story | None) -> list[Span]:
    story, requested = fetch.story, fetch.requested
    stages = forgotten_span(story, depth=1) + state_spans(story, STAGES, depth=1)
    there, back = way_spans(story, requested.asked_s, last_end(stages), depth=1)
    pending = [span for asked in there for span in pending_span(requested.wanted_s, asked)]
    stages = there + stages + back
    started_at = stages[0].start_s if stages else story.started_at or 0.0
    root = Span(
        name="fetch",
        start_s=started_at,
        end_s=last_end(stages) or (started_at if not stages else None),
        error="" if fetch.error is None else f"{fetch.error.code}: {fetch.error.message}",
        attributes=_attributes(fetch),
    )
    return [root, *nested(stages, _leg_spans(reads, depth=2)), *pending]


def _leg_spans(reads: Story | None, *, depth: int) -> list[Span]:
    spans = [] if reads is None else state_spans(reads, LEGS, depth=depth)
    return [span for span in spans if span.about]


def _attributes(fetch: FetchEntry) -> dict[str, str | int | float]:
    requested, ticket = fetch.requested, fetch.requested.ticket
    return {
        "request_id": ticket.request_id,
        "fetch_id": requested.name,
        "offer_id": ticket.offer_id,
        "engine_id": requested.engine_id,
        "state": fetch.state.value,
        "num_tokens": requested.num_tokens,
        "num_bytes": fetch.num_bytes,
        "path": fetch.path,
        "prefill_agent": ticket.agent_id,
        **trace_attributes(requested.traceparent, ticket.traceparent),
    }
