"""Offers that are awaited by a name before they are made.

Each case is a script: events, with the time when it passes, and the answers; see `told`.
"""

from typing import Any

import pytest

from kvbus.geometry import BlockTable
from kvbus.protocol import AwaitedOffer, AwaitOffer, Decline, MakeOffer, OfferMade, WithdrawOffer
from kvbus.table.events import DeadlinePassed, DrainStarted, Refuse, SendReply
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferLimits
from kvbus_prefill.offer.table import OfferTable
from tests.unit.prefill.tickets import ticket_for

NAME, OTHER, THIRD = "n" * 32, "m" * 32, "k" * 32
LIMITS = OfferLimits(max_offers=2, max_wait_s=5.0, engine_grace_s=2.0)


def id_of(name: str) -> str:
    return f"offer {name[0]}"


def wants(who: str, name: str = NAME, wait_s: float = 2.0) -> ev.RequestReceived[AwaitOffer]:
    return ev.RequestReceived(
        AwaitOffer(transfer_id=name, wait_s=wait_s), who, fresh=f"until {id_of(name)}"
    )


def declined(who: str, name: str = NAME) -> ev.RequestReceived[Decline]:
    return ev.RequestReceived(Decline(transfer_id=name), who, fresh=f"until {id_of(name)}")


def made(name: str = NAME, request_id: str = "") -> ev.Opened:
    tables = {"full": BlockTable.of([3])}
    message = MakeOffer(request_id or name[0], 8, tables, transfer_id=name)
    return ev.Opened(message, "engine", ticket_for(message, id_of(name), "s" * 32), ttl_s=100.0)


MADE, DUE = made(), DeadlinePassed()
WITHDRAWN = ev.RequestReceived(WithdrawOffer(offer_id=id_of(NAME)), "engine", engine_id="engine")
ENDED = (WITHDRAWN, {"engine": "ok"})
GONE, THERE, DRAINS = ev.EnginesGone(), ev.EngineReady(), DrainStarted()


def told(commands: list[ev.Command]) -> dict[str, str]:
    """The answer to each: ``made`` is a ticket, ``ok`` a success, the rest are codes."""
    words = {}
    for command in commands:
        match command:
            case SendReply(who, AwaitedOffer(ticket)):
                words[str(who)] = "made"
                assert ticket["offer_id"].startswith("offer ")
            case SendReply(who, body) if not isinstance(body, OfferMade):
                words[str(who)] = "ok"
            case Refuse(who, error):
                words[str(who)] = str(error.code)
    return words


Step = ev.Event | tuple[ev.Event, dict[str, str]] | tuple[float, ev.Event, dict[str, str]]


def play(*steps: Step) -> OfferTable:
    """Handle each event; an event alone comes when the one before did, and has no answer."""
    table, now = OfferTable(LIMITS), 0.0
    for step in steps:
        parts: list[Any] = [*step] if isinstance(step, tuple) else [step, {}]
        now = parts.pop(0) if isinstance(parts[0], int | float) else now
        event, expected = parts
        assert told(table.handle(event, now)) == expected, (now, event)
    return table


# fmt: off
SCRIPTS: dict[str, list[Step]] = {
    "who comes early is answered when the offer is made": [wants("a"), (1, wants("b"), {}),
        (1.5, MADE, {"a": "made", "b": "made"}), (2, DUE, {}), (wants("c"), {"c": "made"})],
    "who comes late is answered at once": [MADE, (wants("a"), {"a": "made"})],
    "a reader that has waited long enough is busy and may ask again": [wants("a"),
        wants("b", wait_s=3.0), (2, DUE, {"a": "busy"}), (3, DUE, {"b": "busy"}),
        (4, wants("c"), {}), (4.5, MADE, {"c": "made"})],
    "who waits no longer is not answered": [wants("a"), wants("b"), ev.Abandoned(NAME, "a"),
        ev.Abandoned(NAME, "b"), wants("c"), (MADE, {"c": "made"})],
    "no reader waits for longer than the limit": [wants("a", wait_s=1000.0), (4.999, DUE, {}),
        (5, DUE, {"a": "busy"})],
    "the end of an offer is its answer": [MADE, ENDED, (wants("a"), {"a": "offer_withdrawn"})],
    "an offer that is given up before it is made is never made": [wants("a"),
        (declined("b"), {"a": "cancelled", "b": "ok"}), (wants("c"), {"c": "cancelled"})],
    "an offer that is given up when it is made is withdrawn": [MADE, (declined("b"), {"b": "ok"}),
        (wants("c"), {"c": "offer_withdrawn"})],
    "while the agent drains no reader waits": [wants("a"), made(OTHER), (DRAINS, {"a": "draining"}),
        (wants("b"), {"b": "draining"}), (wants("c", OTHER), {"c": "made"})],
    "readers fail at once when no engine is left": [THERE, wants("a", wait_s=5.0),
        (1, GONE, {"a": "engine_lost"})],
    "who asks while no engine is there waits for one for a while": [(1, GONE, {}),
        (1.5, wants("a", wait_s=5.0), {}), (3, DUE, {"a": "busy"}),
        (3.001, wants("b"), {"b": "engine_not_ready"})],
    "the while counts from the last engine and not from each that never was ready": [(1, GONE, {}),
        (2.9, GONE, {}), (3, wants("a"), {"a": "engine_not_ready"})],
    "an engine that comes in time makes the offer": [GONE, (1.5, wants("a", wait_s=5.0), {}),
        (1.9, THERE, {}), (2, DUE, {"a": "busy"}), (2.001, wants("b", wait_s=4.0), {}),
        (5, MADE, {"b": "made"})],
    "what was made and given up is known without an engine": [MADE, GONE,
        (9, declined("a", OTHER), {"a": "ok"}), (10, wants("b"), {"b": "made"}),
        (wants("c", OTHER), {"c": "cancelled"}), DRAINS, (wants("d", THIRD), {"d": "draining"})],
}
# fmt: on


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_who_is_told_what_of_an_offer_by_its_name(script: list[Step]) -> None:
    play(*script)


def test_a_name_that_nobody_waits_for_is_forgotten() -> None:
    busy, lost = (2.0, DUE, {"a": "busy"}), (1.0, GONE, {"a": "engine_lost"})
    for end in (ev.Abandoned(NAME, "a"), busy, lost):
        table = play(THERE, wants("a"), end)
        assert not table.live
        assert table.num_waiting == 0


def test_a_name_is_made_once_and_not_after_it_was_given_up() -> None:
    given_up = [(declined("b"), {"b": "ok"})]
    for steps, code in (
        ([MADE], "offer_exists"),
        ([MADE, ENDED], "offer_exists"),
        (given_up, "cancelled"),
    ):
        play(*steps, (made(request_id="another"), {"engine": code}))
