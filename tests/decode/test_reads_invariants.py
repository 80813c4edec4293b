"""The read table under every interleaving of late bytes, lost answers, aborts and ends.

Whatever happens: no block is free while a leg can still write into it, no slot is given back or
given on while it is used, every chunk ends exactly once, and one that ends well is right.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvbus.errors import ErrorCode, LocalError, RemoteError
from kvbus_decode.read import events as ev
from tests.decode.read_world import (
    BOX_BYTES,
    NUM_READERS,
    SLOT_LEASE_S,
    ReadWorld,
    RemoteSlot,
    SeenRead,
)
from tests.examples import num_examples, rarely

KINDS = st.sampled_from(
    ["direct", "mapped", "reordered", "packed", "packed", "joined", "delegated"]
)
HOLDERS = st.sampled_from(["holder a", "holder b", "holder b"])
DEVICES = st.sampled_from(["host", "host", "gpu"])
LEGS = st.lists(st.tuples(KINDS, HOLDERS, DEVICES), max_size=7)
ANY = st.sampled_from([0, 0, 0, 1, 2, 5])
ENGINES = st.sampled_from(["engine a", "engine b"])
FAILS = st.sampled_from([False, False, False, False, True])
FAILURE = RemoteError("any", code=ErrorCode.TRANSFER_FAILED)


class ReadInterleavings(ReadWorld):
    """Rules are what fetches, holders, the fabric, threads and the clock can do."""

    @rule(
        kinds=LEGS,
        engine=ENGINES,
        num_zeroed=st.sampled_from([0, 0, 1, 2]),
        num_compared=st.sampled_from([0, 0, 1, 2]),
        within_s=st.sampled_from([None, None, 1.0, 8.0]),
    )
    def want(
        self,
        kinds: list[tuple[str, str, str]],
        engine: str,
        num_zeroed: int,
        num_compared: int,
        within_s: float,
    ) -> None:
        key = f"read {len(self.seen)}"
        unpacked = [kind for kind in kinds if kind[0] in ("direct", "mapped", "delegated")]
        packed = [kind for kind in kinds if kind not in unpacked]
        compared = [("comparing", "holder a", "")] * num_compared
        wanted = ev.ChunkWanted(
            key,
            engine,
            self.make_legs(key, compared + unpacked + packed),
            self.make_legs(key, [("zeroing", "", "host")] * num_zeroed),
            path="any",
            deadline=None if within_s is None else self.now + within_s,
        )
        self.seen[key] = SeenRead(wanted, stopped=self.agent_stopped)
        self.tell(wanted)

    @precondition(lambda self: self.running.packs)
    @rule(which=ANY, fails=FAILS)
    def answer_pack(self, which: int, fails: bool) -> None:
        self.tell(ev.DeadlinePassed())
        packs = self.running.packs
        asked = packs.pop(which % len(packs))
        if fails:
            self.expect_failure(asked.leg.work.read)
            self.tell(ev.PackFailed(asked.key, asked.leg, FAILURE))
            return
        self.num_slot_ids += 1
        leg = asked.leg
        expires_at = leg.asked_at + SLOT_LEASE_S
        self.remote[self.num_slot_ids] = RemoteSlot(leg, leg.work.content, expires_at)
        self.tell(ev.SlotPacked(asked.key, leg, self.num_slot_ids, SLOT_LEASE_S))

    @precondition(lambda self: self.running.reads)
    @rule(which=ANY)
    def land_a_part(self, which: int) -> None:
        self.expire_remote_slots()
        self.land(self.running.reads[which % len(self.running.reads)].leg, 1)

    @precondition(lambda self: self.running.reads)
    @rule(which=ANY, fails=FAILS)
    def end_read(self, which: int, fails: bool) -> None:
        self.tell(ev.DeadlinePassed())
        posted = self.running.reads[which % len(self.running.reads)]
        self.expire_remote_slots()
        self.land(posted.leg, 1 if fails else None)
        self.running.reads.remove(posted)
        num_bytes = 1 if fails else BOX_BYTES
        self.seen[posted.leg.work.read].num_bytes += num_bytes
        if fails:
            self.expect_failure(posted.leg.work.read)
        self.tell(ev.ReadEnded(posted.key, posted.leg, num_bytes, FAILURE if fails else None))

    @precondition(lambda self: self.running.copies)
    @rule(which=ANY, num_blocks=st.integers(1, 2 * NUM_READERS - 1))
    def copy_a_part(self, which: int, num_blocks: int) -> None:
        self.copy(self.running.copies[which % len(self.running.copies)].leg, num_blocks)

    @precondition(lambda self: self.running.copies)
    @rule(which=ANY, fails=FAILS)
    def end_copy(self, which: int, fails: bool) -> None:
        self.tell(ev.DeadlinePassed())
        copied = self.running.copies[which % len(self.running.copies)]
        self.copy(copied.leg, 1 if fails else None)
        self.running.copies.remove(copied)
        num_bytes = 0
        if copied.leg.work.kind == "mapped":
            num_bytes = 1 if fails else BOX_BYTES
        self.seen[copied.leg.work.read].num_bytes += num_bytes
        if fails:
            self.expect_failure(copied.leg.work.read)
        self.tell(ev.CopyEnded(copied.key, copied.leg, num_bytes, FAILURE if fails else None))

    @precondition(lambda self: self.running.delegates)
    @rule(which=ANY, fails=FAILS)
    def end_delegate(self, which: int, fails: bool) -> None:
        self.tell(ev.DeadlinePassed())
        delegates = self.running.delegates
        asked = delegates.pop(which % len(delegates))
        leg, read = asked.leg, asked.leg.work.read
        if leg in self.abandoned:
            self.tell(ev.DelegateEnded(asked.key, leg, BOX_BYTES, "any"))
            return
        self.write(leg, leg.work.content, 1 if fails else None)
        if fails:
            self.expect_failure(read)
            self.tell(ev.DelegateEnded(asked.key, leg, error=FAILURE))
        else:
            self.seen[read].num_bytes += BOX_BYTES
            self.tell(ev.DelegateEnded(asked.key, leg, BOX_BYTES, "any"))

    @precondition(lambda self: self.running.digests)
    @rule(which=ANY, fails=FAILS)
    def answer_digests(self, which: int, fails: bool) -> None:
        self.tell(ev.DeadlinePassed())
        digests = self.running.digests
        asked = digests.pop(which % len(digests))
        if fails:
            self.expect_failure(asked.leg.work.read)
            self.tell(ev.CompareEnded(asked.key, asked.leg, FAILURE))
        else:
            self.tell(ev.DigestsCame(asked.key, asked.leg))

    @precondition(lambda self: self.running.compares)
    @rule(which=ANY, differs=FAILS)
    def end_compare(self, which: int, differs: bool) -> None:
        self.tell(ev.DeadlinePassed())
        compares = self.running.compares
        begun = compares.pop(which % len(compares))
        self.seen[begun.leg.work.read].num_compared += not differs
        if differs:
            self.expect_failure(begun.leg.work.read)
        self.tell(ev.CompareEnded(begun.key, begun.leg, FAILURE if differs else None))

    @rarely(5)
    @precondition(lambda self: self.seen)
    @rule(back=ANY)
    def stop_one(self, back: int) -> None:
        key = list(self.seen)[-1 - back % len(self.seen)]
        self.tell(ev.DeadlinePassed())
        self.seen[key].stopped |= self.seen[key].ended is None
        self.tell(ev.ReadStopped(key, LocalError("aborted", code=ErrorCode.CANCELLED)))

    @rarely(9)
    @rule(engine=ENGINES)
    def lose_engine(self, engine: str) -> None:
        """The other agents of the engine lose it as well: what they wrote is theirs to see to."""
        self.tell(ev.DeadlinePassed())
        mine = [seen for seen in self.seen.values() if seen.wanted.engine == engine]
        for seen in mine:
            seen.stopped |= seen.ended is None
        delegated = [asked.leg for asked in self.running.delegates]
        self.abandoned |= {leg for leg in delegated if self.seen[leg.work.read] in mine}
        self.tell(ev.EngineGone(engine, LocalError("gone", code=ErrorCode.ENGINE_LOST)))
        assert self.table.num_reads(engine) == sum(seen.ended is None for seen in mine)

    @rarely(29)
    @rule()
    def stop_agent(self) -> None:
        self.agent_stopped = True
        self.tell(ev.DeadlinePassed())
        for seen in self.seen.values():
            seen.stopped |= seen.ended is None
        self.tell(ev.Stopped())

    @rule(elapsed_s=st.sampled_from([0.125, 0.125, 0.5, 1.0, 3.0]))
    def pass_time(self, elapsed_s: float) -> None:
        self.now += elapsed_s

    @rarely(4)
    @rule()
    def pass_time_to_the_next_deadline(self) -> None:
        due = self.table.next_deadline()
        self.now = max(self.now, due if due is not None else self.now)
        self.tell(ev.DeadlinePassed())
        due = self.table.next_deadline()
        assert due is None or due > self.now, "handling what is due makes progress"

    def tell(self, event: ev.Event) -> list[ev.Command]:
        """Whatever is due ends first, which stops reads as well."""
        for seen in self.seen.values():
            read = self.table.live.get(seen.wanted.key)
            if read is not None and read.due_at is not None and read.due_at <= self.now:
                seen.stopped = True
        return super().tell(event)

    def expect_failure(self, read: str) -> None:
        """From the next step on nothing of the read may begin."""
        self.seen[read].stopped |= self.seen[read].ended is None

    def teardown(self) -> None:
        """When everything is answered, every chunk has ended, and every slot is back."""
        running = self.running
        while running.packs or running.reads or running.copies or running.digests:
            if running.packs:
                self.answer_pack(which=0, fails=False)
            if running.reads:
                self.end_read(which=0, fails=False)
            if running.copies:
                self.end_copy(which=0, fails=False)
            if running.digests:
                self.answer_digests(which=0, fails=False)
        while running.delegates or running.compares:
            if running.delegates:
                self.end_delegate(which=0, fails=False)
            while running.copies:
                self.end_copy(which=0, fails=False)
            if running.compares:
                self.end_compare(which=0, differs=False)

        assert not self.table.live
        assert all(seen.ended for seen in self.seen.values())
        assert not self.remote, "a slot was left to its lease"
        assert not self.table.num_slots_in_use


TestReadInterleavings = ReadInterleavings.TestCase
TestReadInterleavings.settings = settings(
    deadline=None, max_examples=num_examples(400), stateful_step_count=50
)
