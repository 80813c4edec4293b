"""What the engines do: they offer, grow, seal and withdraw; they fetch, give up and try again."""

from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from kvbus.errors import KVBusError
from kvbus.protocol import Message, Outcome, Rendezvous, Ticket
from kvbus_decode.fetch import events as dec
from kvbus_prefill.offer import events as pre
from tests.simulator.checker import check
from tests.simulator.decode import DecodeAgent
from tests.simulator.memory import BLOCK_SIZE, Fetch, Offer
from tests.simulator.prefill import UNHEARD, PrefillAgent

if TYPE_CHECKING:
    from tests.simulator.world import World

KINDS = (
    "direct",
    "direct",
    "direct",
    "tcp",
    "tcp",
    "mapped",
    "mapped",
    "mapped",
    "packed",
    "reordered",
)
IPC_S = 5e-5
ROOM_S = 0.02
SLACK_S = 1e-3


class Answered:
    """Who hears what an agent says to its engine's request."""

    def __init__(self, on_reply, on_refuse) -> None:
        self._on_reply, self._on_refuse = on_reply, on_refuse

    def reply(self, message: Message) -> None:
        """The agent said yes."""
        self._on_reply()

    def refuse(self, error: KVBusError) -> None:
        """The agent said no."""
        self._on_refuse()


class Load:
    """All engines of a world, until so many offers were made."""

    def __init__(self, world: "World", num_handoffs: int) -> None:
        self.world, self.settings, self._random = world, world.settings.load, world.random
        self.num_left = num_handoffs
        self._offer_numbers, self._fetch_numbers = count(1), count(1)

    def start(self) -> None:
        """Every prefill engine begins at a time of its own."""
        for agent in self.world.prefill:
            self._wait(agent)

    def _wait(self, agent: PrefillAgent) -> None:
        elapsed_s = self._random.expovariate(self.settings.offers_per_s)
        self.world.clock.at(self.world.clock.now + elapsed_s, self._arrive, agent)

    def _arrive(self, agent: PrefillAgent) -> None:
        if not self.num_left:
            return
        self._wait(agent)
        num_blocks = 1 + int(self.settings.largest_offer * self._random.random())
        if not agent.process.up or len(agent.memory.free) <= num_blocks:
            self.world.counts["offers not made"] += 1
            return
        self.num_left -= 1
        self.world.counts["handoffs"] += 1
        self._offer(agent, num_blocks)

    def _offer(self, agent: PrefillAgent, num_blocks: int) -> None:
        random = self._random.random
        offer_id = f"o{next(self._offer_numbers)}"
        reserved = agent.memory.take(num_blocks, None)
        has_state = random() < self.settings.with_state
        state_block = agent.memory.take(1, None)[0] if has_state else None
        num_tokens = BLOCK_SIZE * num_blocks - int(BLOCK_SIZE * random())
        offer = Offer(
            agent,
            agent.memory,
            offer_id,
            num_tokens,
            reserved,
            state_block,
            self.settings.offer_ttl_s,
            agent.boot,
        )
        agent.offers[offer_id] = offer
        is_open = random() < self.settings.open_offers
        offer.write(int(num_blocks * random()) if is_open else num_blocks)
        offer.sealed = not is_open
        if offer.sealed:
            offer.ticket_tables = offer.tables()
        late_s = IPC_S
        if random() < self.settings.met:
            offer.transfer_id = f"name of {offer_id}"
            meets = Rendezvous(offer.transfer_id, agent.name, request_id=offer_id)
            self._send(offer, meets)
            late_s += 1e-2 * random()
        agent.process.after(late_s, self._open, offer)

    def _open(self, offer: Offer) -> None:
        """The agent has the request; its engine may be gone by now."""
        agent = offer.agent
        if offer.outcome:
            return
        ticket = Ticket(
            agent.name,
            offer.boot,
            agent.name,
            agent.engine_id,
            "1",
            offer.offer_id,
            offer.offer_id,
            offer.num_ready,
            "secret",
            blocks="named" if offer.sealed else "",
        )
        answered = Answered(partial(self._route, offer, ticket), partial(self._refused, offer))
        offer.told = True
        self._wait_for_reader(offer)
        opened = pre.Opened(
            offer.offer_id,
            agent.engine_id,
            offer.offer_id,
            offer.num_ready,
            offer.tables(),
            offer.sealed,
            offer.ttl_s,
            "secret",
            {},
            answered,
        )
        agent.open(offer, opened, ticket)

    def _refused(self, offer: Offer) -> None:
        offer.agent.free(offer, "refused")
        del offer.agent.offers[offer.offer_id]

    def _wait_for_reader(self, offer: Offer) -> None:
        """From now on the offer waits for its time to live, and ends with it."""
        offer.waits_until = offer.agent.process.time() + offer.ttl_s
        offer.agent.process.after(offer.ttl_s + SLACK_S, self._check_end, offer)

    def _check_end(self, offer: Offer) -> None:
        """Once its time is up an offer lives as long as its lease."""
        now, process = offer.agent.process.time(), offer.agent.process
        if offer.outcome or now < offer.waits_until:
            return
        if process.is_late:
            process.after(SLACK_S, self._check_end, offer)
            return
        check(offer.leased, 4, "an offer outlives its time", offer)
        left_s = offer.leased_until - now
        check(left_s > -2 * SLACK_S, 4, "a lease outlives its time", offer)
        offer.agent.process.after(max(left_s, 0.0) + SLACK_S, self._check_end, offer)

    def _route(self, offer: Offer, ticket: Ticket) -> None:
        """The ticket is on its way to a decode engine, or to two."""
        settings, random, clock = self.settings, self._random.random, self.world.clock
        if not offer.sealed:
            clock.at(clock.now + 0.05 * random(), self._compute, offer)
        if random() < settings.withdrawn:
            clock.at(clock.now + 0.05 * random(), self._withdraw, offer)
        if not offer.transfer_id and random() >= settings.unread:
            self._send(offer, ticket)

    def _send(self, offer: Offer, ticket: Ticket | Rendezvous) -> None:
        """To one reader, or two."""
        random, clock = self._random.random, self.world.clock
        for _ in range(2 if random() < self.settings.second_readers else 1):
            agent = self._random.choice(self.world.decode)
            clock.at(clock.now + 1e-3 + 4e-3 * random(), self._fetch, offer, ticket, agent)

    def _compute(self, offer: Offer) -> None:
        """More blocks, and the seal with the last of them."""
        agent, start = offer.agent, len(offer.blocks)
        if offer.outcome:
            return
        random = self._random.random
        offer.write(1 + int(3 * random()))
        more = {"full": offer.table(start)} if len(offer.blocks) > start else {}
        is_last = len(offer.blocks) == len(offer.reserved)
        agent.process.after(IPC_S, self._extend, offer, offer.num_ready, more, is_last)
        if not is_last:
            self.world.clock.at(self.world.clock.now + 0.05 * random(), self._compute, offer)

    def _extend(self, offer: Offer, num_tokens: int, more: dict, is_last: bool) -> None:
        if offer.outcome:
            return
        offer.agent.tell(pre.Extended(offer.offer_id, num_tokens, more, UNHEARD))
        if is_last and not offer.outcome:
            offer.sealed = True
            offer.agent.tell(pre.Sealed(offer.offer_id, UNHEARD))
        if not offer.outcome:
            self._wait_for_reader(offer)

    def _withdraw(self, offer: Offer) -> None:
        if not offer.outcome and offer.told:
            withdrawn = pre.Withdrawn(offer.offer_id, None, UNHEARD)
            offer.agent.process.after(IPC_S, offer.agent.tell, withdrawn)

    def _fetch(self, offer: Offer, ticket: Ticket | Rendezvous, agent: DecodeAgent) -> None:
        """The decode engine has the ticket; it waits for room, as long as the offer does."""
        random, settings, clock = self._random.random, self.settings, self.world.clock
        num_blocks = len(offer.reserved)
        skipped = int(num_blocks * random()) if random() < 0.3 else 0
        needed = num_blocks - skipped + (offer.state_block is not None)
        if not agent.process.up or len(agent.memory.free) < needed:
            if not offer.outcome:
                clock.at(clock.now + ROOM_S, self._fetch, offer, ticket, agent)
            return
        fetch = Fetch(
            agent,
            agent.memory,
            offer,
            f"f{next(self._fetch_numbers)}",
            BLOCK_SIZE * skipped,
            [],
            None,
            deadline=0.0,
            kind=self._random.choice(KINDS),
            asked_at=clock.now,
            compares=random() < settings.compared,
        )
        fetch.blocks = fetch.memory.take(num_blocks - skipped, fetch)
        if offer.state_block is not None:
            fetch.state_block = fetch.memory.take(1, fetch)[0]
        offer.readers.append(fetch)
        is_impatient = random() < settings.impatient
        timeout_s = 1e-3 + 0.1 * random() if is_impatient else settings.fetch_timeout_s
        self._request(fetch, ticket, timeout_s)
        if random() < settings.cancelled:
            cancel = dec.CancelRequested(fetch.fetch_id, UNHEARD, release_offer=random() < 0.5)
            agent.process.after(0.02 * random(), self._cancel, fetch, cancel)

    def _request(self, fetch: Fetch, shown: Ticket | Rendezvous, timeout_s: float) -> None:
        agent = fetch.agent
        meets = shown if isinstance(shown, Rendezvous) else None
        ticket = shown.unknown_ticket() if isinstance(shown, Rendezvous) else shown
        requested = dec.Requested(
            fetch_id=fetch.fetch_id,
            engine_id=agent.engine_id,
            ticket=ticket,
            first_token=fetch.first_token,
            num_tokens=fetch.offer.num_tokens,
            tables={},
            timeout_s=timeout_s,
            reply_to=Answered(lambda: None, partial(agent.refused, fetch)),
            has_state=fetch.state_block is not None,
            chunk_tokens=2 * BLOCK_SIZE if self._random.random() < 0.1 else 0,
            meets=meets,
        )
        agent.fetches[fetch.fetch_id] = fetch
        agent.process.after(IPC_S, self._ask, fetch, requested)

    def _ask(self, fetch: Fetch, requested: dec.Requested) -> None:
        """The agent has the request; its engine may be gone by now."""
        if fetch.memory is fetch.agent.memory:
            fetch.agent.request(fetch, requested)
        else:
            fetch.agent.refused(fetch)

    def _cancel(self, fetch: Fetch, cancel: dec.CancelRequested) -> None:
        if fetch.memory is fetch.agent.memory:
            fetch.agent.tell(cancel)

    def on_over(self, fetch: Fetch) -> None:
        """What has failed may be tried again, with another agent."""
        again = fetch.outcome not in (Outcome.COMPLETED, Outcome.CANCELLED)
        if again and not fetch.offer.outcome and self._random.random() < self.settings.read_again:
            offer, agent = fetch.offer, self._random.choice(self.world.decode)
            ticket = Ticket(
                offer.agent.name,
                offer.boot,
                offer.agent.name,
                offer.agent.engine_id,
                "1",
                offer.offer_id,
                offer.offer_id,
                offer.num_tokens if offer.ticket_tables else 0,
                "secret",
            )
            clock = self.world.clock
            clock.at(clock.now + 1e-3, self._fetch, offer, ticket, agent)
