"""Both tables on a network that drops, repeats and reorders, with agents that crash."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvbus.errors import ErrorCode, RemoteError
from kvbus.geometry import BlockTable
from kvbus.protocol import Outcome, Ticket
from kvbus_decode.fetch import events as dec
from kvbus_decode.fetch.ahead import Ahead
from kvbus_prefill.offer import events as pre
from tests.agent.handoff_world import NUM_TOKENS, HandoffWorld, Source, Target
from tests.examples import num_examples, rarely


def connected(world: "HandoffInterleavings") -> None:
    """Deliver until nothing is on the wire."""
    while world.wire:
        world.deliver(0, 1)


class HandoffInterleavings(HandoffWorld):
    """Rules are what engines, network, fabric, clock and fate can do."""

    # The engines.

    @precondition(lambda self: sum(s.outcome is None for s in self.sources.values()) < 2)
    @rule(
        num_tokens=st.sampled_from([0, 5, 16, NUM_TOKENS, NUM_TOKENS, NUM_TOKENS]),
        sealed=st.sampled_from([True, True, False]),
        ttl_s=st.sampled_from([8.0, 8.0, 1.0]),
        readers=st.sampled_from([1, 1, 2]),
    )
    def offer(self, num_tokens: int, *, sealed: bool, ttl_s: float, readers: int = 1) -> None:
        number = len(self.sources)
        offer_id = f"offer-{number}"
        ticket = Ticket(
            "p", self.boot, "tcp://p", "engine-p", "e", offer_id, f"r-{number}", 32, "secret"
        )
        is_whole = num_tokens == NUM_TOKENS
        source = Source(number, ticket, num_tokens, sealed and is_whole, readers=readers)
        self.sources[offer_id] = source
        self.memory |= dict.fromkeys(source.slots(), "not written yet")
        for token in range(num_tokens):
            self.memory[NUM_TOKENS * number + token] = source.kv(token)
        self.memory[source.state_slot] = source.state()
        self.tell_prefill(
            pre.Opened(
                offer_id=offer_id,
                engine_id="engine-p",
                request_id=f"r-{number}",
                num_tokens=num_tokens,
                tables={"full": source.blocks()},
                sealed=source.sealed,
                ttl_s=ttl_s,
                secret=ticket.secret,
                ticket={},
                reply_to=None,
                readers=readers,
            )
        )

    @precondition(lambda self: self.sources)
    @rule(
        back=st.sampled_from([0, 0, 1, 2]),
        num_more=st.sampled_from([0, 3, 8, 16]),
        seal=st.booleans(),
        hint=st.booleans(),
    )
    def compute(self, back: int, num_more: int, seal: bool, hint: bool) -> None:
        source = self.recent_source(back)
        if source.outcome is None and not source.sealed:
            self.write(source, num_more, seal=seal)
        for fetch_id, target in self.targets.items():
            if hint and target.source is source:
                self.tell_decode(dec.OfferAdvanced(fetch_id))

    @precondition(lambda self: self.sources)
    @rule(back=st.sampled_from([0, 0, 1, 2]))
    def finish(self, back: int) -> None:
        """The ticket names the blocks, and the agent is told later: by `compute`."""
        source = self.recent_source(back)
        if source.outcome is None and not source.names_blocks:
            self.name_blocks(source)

    @rarely(5)
    @precondition(lambda self: self.sources)
    @rule(back=st.integers(0, 2))
    def withdraw(self, back: int) -> None:
        self.tell_prefill(pre.Withdrawn(self.recent_source(back).ticket.offer_id, None, None))

    @precondition(
        lambda self: self.sources and sum(t.outcome is None for t in self.targets.values()) < 3
    )
    @rule(
        back=st.sampled_from([0, 0, 0, 1, 2]),
        timeout_s=st.sampled_from([60.0, 10.0, 1.0]),
        first_token=st.sampled_from([0, 0, 12, NUM_TOKENS]),
        has_state=st.booleans(),
        ahead=st.sampled_from(["", "", "alone", "alone", "claims", "altered", "altered claims"]),
    )
    def fetch(
        self,
        back: int,
        *,
        timeout_s: float,
        first_token: int = 0,
        has_state: bool = False,
        ahead: str = "",
    ) -> None:
        """With ``ahead`` by the ticket's blocks, which may have been altered on their way."""
        source = self.recent_source(back)
        blocks = source.blocks()
        if ahead.startswith("altered"):
            blocks = BlockTable.of(blocks.array()[::-1])
        reads_ahead = source.names_blocks and ahead != ""
        fetch_id = f"fetch-{self.num_fetches}"
        self.num_fetches += 1
        self.targets[fetch_id] = Target(source, self.now + timeout_s, first_token, has_state)
        self.tell_decode(
            dec.Requested(
                fetch_id=fetch_id,
                engine_id="engine-d",
                ticket=source.ticket,
                first_token=first_token,
                num_tokens=NUM_TOKENS,
                tables={},
                timeout_s=timeout_s,
                reply_to=fetch_id,
                has_state=has_state,
                route="known" if reads_ahead else None,
                ahead=Ahead({"full": blocks}, ahead.endswith("claims")) if reads_ahead else None,
            )
        )

    @rarely(11)
    @precondition(lambda self: self.targets)
    @rule(back=st.integers(0, 2))
    def cancel(self, back: int) -> None:
        fetch_id = list(self.targets)[-1 - back % len(self.targets)]
        self.tell_decode(dec.CancelRequested(fetch_id, None))

    # The network.

    @precondition(lambda self: self.wire)
    @rule(num_messages=st.integers(1, 4))
    def deliver_in_order(self, num_messages: int) -> None:
        for _ in range(min(num_messages, len(self.wire))):
            self.deliver(0, 1)

    @precondition(lambda self: self.wire)
    @rule(which=st.integers(0, 7), copies=st.sampled_from([1, 1, 1, 1, 2, 0]))
    def deliver(self, which: int, copies: int) -> None:
        """Once is what a network should do; a copy stays on the wire and comes later."""
        message = self.wire.pop(which % len(self.wire))
        self.wire += [message] * (copies - 1)
        if copies:
            self.arrive(message)

    @rarely(4)
    @precondition(lambda self: self.asked)
    @rule(which=st.integers(0, 7))
    def time_out(self, which: int) -> None:
        number = list(self.asked)[which % len(self.asked)]
        self.settle(number, RemoteError("no reply", code=ErrorCode.TIMEOUT))

    @precondition(lambda self: self.targets)
    @rule(back=st.integers(0, 2))
    def hint(self, back: int) -> None:
        fetch_id = list(self.targets)[-1 - back % len(self.targets)]
        self.tell_decode(dec.OfferAdvanced(fetch_id))

    # The fabric.

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 3), place=st.integers(0, NUM_TOKENS))
    def land(self, which: int, place: int) -> None:
        chunk = list(self.reads.values())[which % len(self.reads)]
        places = self.targets[chunk.fetch_id].places(chunk)
        self.land_at(chunk, places[place % len(places)])

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 3), works=st.sampled_from([True, True, True, False]))
    def end_read(self, which: int, works: bool) -> None:
        chunk = list(self.reads.values())[which % len(self.reads)]
        target = self.targets[chunk.fetch_id]
        works &= not target.source.is_cut
        for place in target.places(chunk):
            if works and place not in target.landed:
                self.land_at(chunk, place)
        del self.reads[chunk.fetch_id]
        lost = None if works else RemoteError("fabric", code=ErrorCode.TRANSFER_FAILED)
        num_bytes = chunk.stop - chunk.start
        self.tell_decode(dec.ChunkRead(chunk.fetch_id, num_bytes, lost, "direct"))

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 3))
    def cut_memory(self, which: int) -> None:
        chunk = list(self.reads.values())[which % len(self.reads)]
        self.cut(self.targets[chunk.fetch_id].source)

    @precondition(lambda self: self.targets)
    @rule(num_rounds=st.integers(1, 4), num_more=st.sampled_from([0, 5, 8, 16]))
    def go_well(self, num_rounds: int, num_more: int) -> None:
        """For a while nothing goes wrong, and the prefill engine computes."""
        for _ in range(num_rounds):
            if num_more:
                self.compute(0, num_more=num_more, seal=True, hint=True)
            connected(self)
            if self.reads:
                self.end_read(0, works=True)

    # Clock and fate.

    @rule(elapsed_s=st.sampled_from([0.125, 0.125, 0.5, 2.0]), told=st.booleans())
    def pass_time(self, elapsed_s: float, told: bool) -> None:
        self.now += elapsed_s
        if told:
            self.tell_prefill(pre.DeadlinePassed())
            self.tell_decode(dec.DeadlinePassed())

    @rarely(17)
    @rule(noticed=st.booleans())
    def crash_prefill(self, noticed: bool) -> None:
        """The engine hears of it and uses its blocks again; the decode agent may not."""
        boot = self.boot
        for source in self.sources.values():
            if source.outcome is None:
                self.overwrite(source, Outcome.WITHDRAWN)
        self.start_prefill()
        if noticed:
            self.tell_decode(dec.PeerGone(boot))

    @rarely(19)
    @rule()
    def crash_decode(self) -> None:
        for target in self.targets.values():
            target.outcome = target.outcome or Outcome.FAILED
        self.asked.clear()
        self.reads.clear()
        self.start_decode()

    def settle_everything(self) -> None:
        """From now on nothing is lost: deliver, read and wait until nobody has anything to do."""
        for source in self.sources.values():
            self.say(source)
        while self.wire or self.asked or self.reads or self.due() is not None:
            while self.wire or self.reads:
                if self.wire:
                    self.deliver(0, 1)
                if self.reads:
                    self.end_read(0, works=True)
            if self.asked:
                self.time_out(0)
            self.now = max(self.now, self.due() or 0.0)
            self.tell_prefill(pre.DeadlinePassed())
            self.tell_decode(dec.DeadlinePassed())

    def due(self) -> float | None:
        times = (self.prefill.next_deadline(), self.decode.next_deadline())
        return min((when for when in times if when is not None), default=None)

    def teardown(self) -> None:
        self.settle_everything()

        assert not self.prefill.live
        assert not self.decode.live
        assert all(source.outcome for source in self.sources.values())
        assert all(target.outcome for target in self.targets.values())


TestHandoffInterleavings = HandoffInterleavings.TestCase
TestHandoffInterleavings.settings = settings(
    deadline=None, max_examples=num_examples(400), stateful_step_count=60
)
