"""Handles of an engine on its offers and fetches; the state is in the link's event loop."""

from collections.abc import Generator, Mapping
from functools import partial
from typing import Any

from kvbus.engine.fetches import Fetches, FetchRequest
from kvbus.engine.later import Completion, Handle, Runner
from kvbus.engine.messages import BlockIds, end_of, tables_of
from kvbus.engine.offers import Change, OfferRequest, Offers
from kvbus.errors import KVBusError, LocalError
from kvbus.protocol.engine import (
    NUM_SEQUENCE_WORDS,
    ExtendOffer,
    Fetched,
    Outcome,
    ParkOffer,
    SealOffer,
    WithdrawOffer,
)
from kvbus.protocol.ticket import packed_tables


class Offer(Handle):
    """An offer of a prefill engine, made by `Link.offer`.

    ``made`` has the ticket; ``await`` of the offer waits for it. ``ended`` has the `Outcome`: then
    the engine may reuse the blocks. ``ended`` raises if the offer was refused, and `ClosedError`
    after the link closed.

    Calls return immediately, in any thread, and keep their order. You may ignore their results: an
    error ends the offer and is its `error`. Without an agent, calls wait, except `withdraw`. With a
    stopped agent, the offer has an `error`, and ends when the agent exits or reports the end.
    """

    def __init__(self, runner: Runner, offers: Offers, state: OfferRequest) -> None:
        self._runner, self._offers, self._state = runner, offers, state
        self.request_id = state.message.request_id
        self.made: Completion[dict[str, Any]] = state.made
        self.ended: Completion[Outcome] = state.ended
        self._ends = {group: end_of(table) for group, table in state.message.tables.items()}
        self._after = state.message.after
        self._waits: Completion[Any] | None = state.made if self._after else None
        """Done once the agent has seen all numbers."""

    def __await__(self) -> Generator[Any, None, "Offer"]:
        yield from self.made.__await__()
        return self

    @property
    def ticket(self) -> dict[str, Any]:
        """The JSON-able ticket for the decode engine; blocks until it exists. Raises the refusal.

        In an event loop, ``await`` the offer first: the link's loop raises `LocalError` otherwise.
        """
        self.made.wait()
        return dict(self._state.reply.ticket)

    @property
    def offer_id(self) -> str:
        """Empty before the offer is made."""
        return self._state.offer_id

    @property
    def error(self) -> KVBusError | None:
        """The first error of the offer or of a change; it ends the offer."""
        return self._state.error

    @property
    def outcome(self) -> Outcome | None:
        """The result of ``ended``; None before, and when no agent reports it."""
        has_outcome = self.ended.done() and self.ended.exception() is None
        return self.ended.result() if has_outcome else None

    def extend(
        self,
        num_tokens: int,
        block_ids: BlockIds | None = None,
        *,
        first_blocks: Mapping[str, int] | None = None,
        after: int = 0,
    ) -> Completion[None]:
        """Report ``num_tokens`` ready tokens in all; ``block_ids`` has the new blocks only.

        ``first_blocks`` has the index of the first block, for groups that had no blocks yet.
        ``after`` is a number of `Link.record`, of the same stream as before. Raises
        `GeometryError` for ids that are not unsigned 32-bit integers.
        """
        self._check_stream(after)
        tables = tables_of(block_ids or {}, {**(first_blocks or {}), **self._ends})
        self._ends |= {group: end_of(table) for group, table in tables.items()}
        return self._change(
            lambda offer_id: ExtendOffer(offer_id, num_tokens, tables, after), after
        )

    def seal(self, *, after: int = 0) -> Completion[None]:
        """Report that all tokens are ready."""
        self._check_stream(after)
        return self._change(lambda offer_id: SealOffer(offer_id, after), after)

    def park(self) -> Completion[None]:
        """Move the offer into the agent's pool, soon after its seal; ``ended`` is ``parked`` then.

        The offer stays in the engine's blocks while a reader reads it, or the pool is full. The
        result raises with code ``config`` if the agent has no pool, and the offer continues.
        """
        return self._change(ParkOffer)

    def withdraw(self) -> Completion[None]:
        """End the offer, because its request was aborted; ``ended`` follows."""
        return self._change(WithdrawOffer)

    def ticket_naming(
        self,
        num_tokens: int,
        block_ids: BlockIds,
        *,
        first_blocks: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """Return a ticket for an open offer that will be sealed with exactly these blocks.

        A decode agent may read immediately, and checks the seal afterwards. So send it after all
        tokens are computed, and then do not write to the blocks. Returns `ticket` if the agent
        signs tickets, if the blocks are too many, or while the agent waits for an ``after``.
        """
        ticket, max_blocks = self.ticket, self._state.reply.ticket_blocks
        is_ready = self._waits is None or (self._waits.done() and not self._waits.exception(0))
        if not (max_blocks and is_ready):
            return ticket
        blocks = packed_tables(tables_of(block_ids, first_blocks), max_blocks=max_blocks)
        return ticket | {"num_tokens": num_tokens, "blocks": blocks} if blocks else ticket

    # If the agent restarts, it gets all tokens with one number, the largest.
    def _check_stream(self, after: int) -> None:
        if after and self._after and (after - self._after) % NUM_SEQUENCE_WORDS:
            raise LocalError(
                f"the numbers {self._after} and {after} are of two streams: an offer's numbers are "
                f"equal modulo {NUM_SEQUENCE_WORDS}"
            )
        self._after = max(after, self._after)

    def _change(self, make: Change, after: int = 0) -> Completion[None]:
        done: Completion[None] = Completion(self._runner)
        if after:
            self._waits = done
        self._runner.post(partial(self._offers.change, self._state, make, done))
        return done


class Fetch(Handle):
    """A fetch of a decode engine, made by `Link.fetch`; calls return immediately, in any thread.

    ``ended`` has a `Fetched` when valid KV is in the blocks; otherwise it raises `FetchFailed`.
    Stage ``lost`` means that the agent was lost and none followed in time, that the link closed, or
    that a live agent closed the connection.

    ``freed`` arrives with ``ended`` or later, when no process can write into the blocks. It raises
    `PeerLost`, `AgentHungUp` or `ClosedError` if the link cannot know this. Then do not reuse the
    blocks: close the engine's links and register new memory.
    """

    def __init__(self, fetches: Fetches, state: FetchRequest) -> None:
        self._fetches, self._state = fetches, state
        self.fetch_id = state.fetch_id
        self.ended: Completion[Fetched] = state.ended
        self.freed: Completion[None] = state.freed

    @property
    def notice(self) -> Fetched | None:
        """The end, also of a failed fetch; None before. Stage ``silent``: the agent is stopped."""
        return self._state.notice

    @property
    def ticket(self) -> Mapping[str, Any]:
        return self._state.message.ticket

    @property
    def are_blocks_free(self) -> bool:
        """Whether no agent can write into the blocks.

        After `Link.ended` has reported the fetch, this changes only with its next report.
        """
        return self._state.is_free and not (self.awaits_report and not self.is_observed)

    def cancel(self, *, release_offer: bool = False) -> Completion[None]:
        """Cancel the fetch: ``ended`` raises with code ``cancelled``, unless it ended before.

        ``release_offer`` also releases the ticket's offer, even after a failed fetch.
        """
        done: Completion[None] = Completion(self._fetches.runner)
        self._fetches.runner.post(partial(self._fetches.cancel, self._state, release_offer, done))
        return done
