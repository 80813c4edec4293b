"""The table of offers, watched: what it says of leases must be what was said before.

Refuses to look into the table: the events and the commands are all that counts.
"""

from typing import Any

from kvbus.protocol import Granted, Outcome
from kvbus_prefill.offer import events as ev
from kvbus_prefill.offer.entry import OfferLimits
from kvbus_prefill.offer.table import OfferTable
from tests.simulator.checker import check
from tests.simulator.memory import Offer

SLACK_S = 1e-6
ANSWERS = ev.SendReply, ev.Refuse


class CheckedOfferTable(OfferTable):
    """An offer table, whose every step is held against all steps before."""

    def __init__(self, limits: OfferLimits, offers: dict[str, Offer]) -> None:
        super().__init__(limits)
        self._offers = offers

    def handle(self, event: ev.Event, now: float) -> list[ev.Command]:
        """As the table does."""
        commands = super().handle(event, now)
        for command in commands:
            match command:
                case ev.EndLease():
                    self._end(command, event, now)
                case ev.BeginLease(offer_id, epoch):
                    self._begin(self._offers[offer_id], epoch, event, now)
                case ev.ReportReleased():
                    self._release(command, event, now)
        for command in commands:
            if isinstance(command, ev.SendReply):
                self._reply(command, event, commands, now)
        answers = [one for one in commands if isinstance(one, ANSWERS)]
        check(
            len(answers) == hasattr(event, "reply_to"),
            8,
            "{n} answers to {event}",
            n=len(answers),
            event=event,
        )
        return commands

    def _begin(self, offer: Offer, epoch: int, event: Any, now: float) -> None:
        check(not offer.leased, 1, "two leases are live", offer)
        check(epoch > offer.last_epoch, 5, "epoch {epoch} was given before", offer, epoch=epoch)
        check(isinstance(event, ev.Claimed) and not offer.outcome, 5, "nobody claimed", offer)
        offer.leased = offer.last_epoch = epoch
        offer.lease_began = offer.leased_until = now

    def _end(self, command: ev.EndLease, event: Any, now: float) -> None:
        offer, reason = self._offers[command.offer_id], command.reason
        check(command.epoch == offer.leased, 5, "{one} is not live", offer, one=command)
        is_about_it = getattr(event, "offer_id", None) == offer.offer_id
        if reason == "expired":
            is_due = now >= offer.leased_until - SLACK_S
            check(is_due, 1, "a lease ends before the time that its reader was told", offer)
        elif reason == "ended":
            epoch = getattr(event, "epoch", offer.leased)
            check(is_about_it and epoch == offer.leased, 5, "{by} ended a lease", offer, by=event)
        else:
            causes = ev.Claimed | ev.Withdrawn | ev.EngineLost | ev.Stopped
            check(isinstance(event, causes), 5, "{by} revoked a lease", offer, by=event)
        offer.leased = 0

    def _release(self, command: ev.ReportReleased, event: Any, now: float) -> None:
        offer = self._offers[command.offer_id]
        check(not offer.leased, 1, "its lease is live", offer)
        check(not offer.outcome, 4, "released twice", offer)
        if command.outcome is Outcome.EXPIRED:
            check(now >= offer.waits_until - SLACK_S, 4, "expired before its time", offer)
        elif command.outcome is Outcome.COMPLETED:
            is_asked = isinstance(event, ev.Confirmed | ev.Taken)
            is_right = is_asked and event.offer_id == offer.offer_id
            check(is_right, 5, "completed by {by}", offer, by=event)

    def _reply(
        self, command: ev.SendReply, event: Any, commands: list[ev.Command], now: float
    ) -> None:
        """A yes is right: the reader whose lease was live until now, or what is said again."""
        offer = self._offers.get(getattr(event, "offer_id", ""))
        if offer is None:
            return
        if isinstance(command.body, Granted):
            granted = command.body
            check(granted.epoch == offer.leased, 5, "it is not live: {grant}", offer, grant=granted)
            offer.leased_until = max(offer.leased_until, now + granted.lease_s)
            most = offer.lease_began + self.limits.max_hold_s + SLACK_S
            check(offer.leased_until <= most, 4, "a lease is renewed for ever", offer)
            check(granted.num_tokens <= offer.num_ready, 2, "tokens that do not exist", offer)
        elif isinstance(event, ev.Taken):
            check(offer.sealed, 2, "what was not sealed is taken", offer)
            check(event.tables == offer.tables(), 2, "other blocks were read", offer)
            self._say_yes(offer, event.token)
        elif isinstance(event, ev.Confirmed):
            ended = [c.epoch for c in commands if isinstance(c, ev.EndLease)]
            was_live = event.epoch in ended and now <= offer.leased_until + SLACK_S
            is_again = offer.completed_by == event.token
            check(is_again or was_live, 2, "it was not live: {by}", offer, by=event)
            self._say_yes(offer, event.token)

    def _say_yes(self, offer: Offer, token: str) -> None:
        """One offer, one reader who has it."""
        check(offer.completed_by in ("", token), 2, "two readers are told yes", offer)
        check(offer.sealed, 2, "a yes before the seal", offer)
        offer.completed_by = token
