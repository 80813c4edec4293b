"""A decode agent: the real tables of fetches and reads, and what its shell does around them.

What it does with commands and answers follows `kvbus_decode.agent` and
`kvbus_decode.peer.lease_client`.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvbus.errors import KVBusError, LocalError, PeerLost
from kvbus.geometry import BlockTable
from kvbus.protocol import Granted, Outcome, Ticket
from kvbus.table import Driver
from kvbus_decode.fetch import events as ev
from kvbus_decode.fetch.ahead import Ahead
from kvbus_decode.fetch.table import FetchTable
from kvbus_decode.read.events import EngineGone
from kvbus_decode.read.events import Stopped as ReadsStopped
from kvbus_prefill.meeting import events as meeting
from kvbus_prefill.offer import events as pre
from tests.simulator.checker import check
from tests.simulator.memory import Fetch, Memory
from tests.simulator.network import Client
from tests.simulator.network import Outcome as Answer
from tests.simulator.prefill import CheckMemory, Handshake, PrefillAgent
from tests.simulator.reading import Reading

if TYPE_CHECKING:
    from tests.simulator.world import World

RELEASE_TIMEOUT_S = 5.0
DRAIN_PERIOD_S = 1.0
MEETING_WAIT = 0.8
"""As `kvbus_decode.peer.meeting_client`: the part of a request's time that the other side waits."""
SLACK_S = 1e-3


class DecodeAgent:
    """One decode agent on its machine, and the engine beside it."""

    def __init__(self, world: "World", name: str) -> None:
        self.world, self.name = world, name
        self.process = world.process(name)
        self.memory = Memory(world.settings.load.blocks, world.writes)
        self.start()

    @property
    def engine_id(self) -> str:
        """The engine, in this life of it."""
        return f"{self.name}-engine"

    def start(self) -> None:
        """A new process, with empty tables."""
        self.boot = f"{self.name}-boot-{self.process.life}"
        self._names = pre.ReaderProcess(self.name, self.boot)
        self.fetches: dict[str, Fetch] = {}
        self.routes: set[str] = set()
        self._clients: dict[PrefillAgent, Client] = {}
        self.table = FetchTable(self.world.settings.fetches)
        self.driver: Driver[ev.Event] = Driver(self.table, self.process)
        self.reading = Reading(self)
        self.driver.commands |= {
            ev.SendMeet: self._meet,
            ev.SendForgo: self._forgo,
            ev.ResolvePeer: self._resolve,
            ev.HoldPeer: lambda _: None,
            ev.SendClaim: self._claim,
            ev.SendRenew: self._renew,
            ev.ReadChunk: self._read_chunk,
            ev.StopRead: lambda command: self.reading.stop(command.fetch_id),
            ev.SendConfirm: self._confirm,
            ev.SendTake: self._take,
            ev.SendRelease: self._release,
            ev.SendWithdraw: self._withdraw,
            ev.ReportLanded: lambda _: None,
            ev.ReportFetched: self._report_fetched,
            ev.ReportBlocksFreed: self._report_blocks_freed,
        }

    def tell(self, event: ev.Event) -> None:
        """Something happens to a fetch."""
        self.driver.dispatch(event)
        limits, table = self.table.limits, self.table
        is_bounded = len(table.live) <= limits.max_fetches
        check(is_bounded and len(table.retired) <= limits.max_retired, 6, "too many fetches")

    def client(self, source: PrefillAgent) -> Client:
        """The connection to a prefill agent, made when it is needed."""
        client = self._clients.get(source)
        if client is None:
            client = self._clients[source] = Client(
                self.world.network,
                self.process,
                source.server,
                boot=f"{self.boot}-{len(self._clients)}",
                on_lost=self._see_other_boot,
            )
        return client

    def known_client(self, source: PrefillAgent) -> Client | None:
        """The connection, if there is one."""
        return self._clients.get(source)

    def request(self, fetch: Fetch, requested: ev.Requested) -> None:
        """The engine asks for a fetch; read ahead where its path and its ticket allow."""
        fetch.deadline = self.process.time() + requested.timeout_s
        self.fetches[fetch.fetch_id] = fetch
        boot, tables = requested.ticket.agent_boot, fetch.offer.ticket_tables
        if boot in self.routes:
            ahead = None
            if tables and fetch.kind in ("mapped", "direct", "tcp") and not requested.chunk_tokens:
                is_altered = self.world.random.random() < self.world.settings.load.altered
                known = {name: _altered(t) for name, t in tables.items()} if is_altered else tables
                ahead = Ahead(known, claims=fetch.kind != "mapped")
            requested = replace(requested, route="known", ahead=ahead)
        last_s = requested.timeout_s + self.table.limits.confirm_grace_s
        self.process.after(last_s + SLACK_S, self._check_end, fetch)
        self.tell(requested)

    def refused(self, fetch: Fetch) -> None:
        """The table did not take it."""
        self.fetches.pop(fetch.fetch_id, None)
        self._hand_back(fetch, "refused")

    def hear_of(self, fetch: Fetch) -> None:
        """A hint."""
        if fetch.fetch_id in self.fetches:
            self.tell(ev.OfferAdvanced(fetch.fetch_id))

    def hear_sign(self, source: PrefillAgent, boot: str) -> None:
        """A sign of life of a prefill agent."""
        if source in self._clients:
            self._clients[source].hear(boot)

    def resume(self) -> None:
        """The process goes on."""
        self.process.resume()

    def lose_peer(self, source: PrefillAgent) -> None:
        """The connection is refused: the process is gone."""
        for fetch in list(self.fetches.values()):
            if fetch.offer.agent is source:
                self.tell(ev.StepFailed(fetch.fetch_id, PeerLost("the agent is gone")))

    def end(self) -> None:
        """The process is gone, and what it read: its engine sees that, and has its blocks again."""
        self.process.end()
        for fetch in list(self.fetches.values()):
            fetch.in_flight = 0
            self._hand_back(fetch, "agent lost")
        self.fetches.clear()

    def shut_down(self) -> None:
        """It is asked to end, and says so to who waits."""
        self.tell(ev.Stopped())
        self.reading.tell(ReadsStopped())
        for fetch in self.fetches.values():
            is_over = fetch.outcome or fetch.fetch_id not in self.table.live
            check(is_over, 4, "an agent ends and does not say so", fetch)

    def lose_engine(self) -> None:
        """The engine ends and comes back, with other memory."""
        self.tell(ev.EngineLost(self.engine_id))
        error = LocalError("a process of the engine ended")
        self.reading.tell(EngineGone(self.memory, error))
        for fetch in self.fetches.values():
            is_over = fetch.outcome or fetch.fetch_id not in self.table.live
            check(is_over, 4, "a fetch outlives its engine", fetch)
        self.memory = Memory(self.world.settings.load.blocks, self.world.writes)

    def _see_other_boot(self, before: str) -> None:
        self.routes.discard(before)
        self.tell(ev.PeerGone(before))

    def _resolve(self, command: ev.ResolvePeer) -> None:
        fetch = self.fetches[command.fetch_id]
        boot = fetch.offer.boot

        def on_reply(answer: Answer) -> None:
            if isinstance(answer, KVBusError):
                self.tell(ev.StepFailed(fetch.fetch_id, answer))
            elif not fetch.outcome:
                self.routes.add(boot)
                self.tell(ev.PeerReady(fetch.fetch_id))

        self.client(fetch.offer.agent).ask(boot, command.timeout_s, on_reply, Handshake)

    def _meet(self, command: ev.SendMeet) -> None:
        """Whoever is at the address is asked: it may be a later process, to which it is new."""
        fetch = self.fetches[command.fetch_id]
        source = fetch.offer.agent
        asked = fetch.offer.transfer_id, MEETING_WAIT * command.timeout_s
        on_reply = partial(self._on_met, fetch)
        self.client(source).ask(source.boot, command.timeout_s, on_reply, meeting.Awaited, *asked)

    def _on_met(self, fetch: Fetch, answer: Answer) -> None:
        if isinstance(answer, KVBusError):
            self.tell(ev.StepFailed(fetch.fetch_id, answer, self.world.random.random()))
        else:
            ticket = answer.ticket["ticket"]
            check(ticket.offer_id == fetch.offer.offer_id, 5, "another offer's ticket", fetch)
            self.world.counts["offers met"] += 1
            self.tell(ev.OfferMet(fetch.fetch_id, ticket))

    def _forgo(self, command: ev.SendForgo) -> None:
        source = self.world.source(command.meets.endpoint)
        name = command.meets.transfer_id
        client = self.client(source)
        client.ask(source.boot, RELEASE_TIMEOUT_S, lambda _: None, meeting.Forgone, name)

    def _claim(self, command: ev.SendClaim) -> None:
        fetch = self.fetches[command.fetch_id]
        fetch.num_claims += 1
        ticket = command.requested.ticket
        reader, token = f"{self.boot}/{fetch.fetch_id}", f"{fetch.fetch_id}/{fetch.num_claims}"
        on_reply = partial(self._on_granted, fetch, self.process.time(), ticket)
        asked = ticket.offer_id, ticket.secret, reader, self.table.limits.lease_s, token
        self._ask(fetch, command.timeout_s, on_reply, pre.Claimed, *asked, process=self._names)

    def _renew(self, command: ev.SendRenew) -> None:
        fetch = self.fetches[command.fetch_id]
        on_reply = partial(self._on_granted, fetch, self.process.time(), None)
        lease = fetch.offer.offer_id, command.epoch, command.token
        asked = *lease, self.table.limits.lease_s, command.known_blocks
        self._ask(fetch, command.timeout_s, on_reply, pre.Renewed, *asked)

    def _confirm(self, command: ev.SendConfirm) -> None:
        fetch = self.fetches[command.fetch_id]
        lease = fetch.offer.offer_id, command.epoch, command.token
        on_reply = partial(self._on_confirmed, fetch)
        self._ask(fetch, command.timeout_s, on_reply, pre.Confirmed, *lease)

    def _take(self, command: ev.SendTake) -> None:
        fetch = self.fetches[command.fetch_id]
        offer, reader = fetch.offer, f"{self.boot}/{fetch.fetch_id}"
        asked = offer.offer_id, "secret", reader, f"{fetch.fetch_id}/take", command.tables
        on_reply = partial(self._on_confirmed, fetch)
        self._ask(fetch, command.timeout_s, on_reply, pre.Taken, *asked, process=self._names)

    def _release(self, command: ev.SendRelease) -> None:
        source = self.world.source_of(command.ticket)
        asked = command.ticket.offer_id, command.epoch, command.token
        boot = command.ticket.agent_boot
        client = self.client(source)
        client.ask(boot, RELEASE_TIMEOUT_S, lambda _: None, pre.Returned, *asked)

    def _withdraw(self, command: ev.SendWithdraw) -> None:
        ticket = command.ticket
        client = self.client(self.world.source_of(ticket))
        asked = ticket.offer_id, ticket.secret
        client.ask(ticket.agent_boot, RELEASE_TIMEOUT_S, lambda _: None, pre.Withdrawn, *asked)

    def _ask(self, fetch: Fetch, timeout_s: float, *asked: Any, **named: Any) -> None:
        check(not fetch.outcome, 4, "an ended fetch asks for something", fetch)
        self.client(fetch.offer.agent).ask(fetch.offer.boot, timeout_s, *asked, **named)

    def _on_granted(
        self, fetch: Fetch, sent_at: float, claimed: Ticket | None, answer: Answer
    ) -> None:
        if isinstance(answer, Granted):
            self.tell(ev.LeaseGranted(fetch.fetch_id, sent_at, answer, claimed))
        elif isinstance(answer, KVBusError):
            luck = () if claimed is None else (self.world.random.random(),)
            kind = ev.RenewFailed if claimed is None else ev.StepFailed
            self.tell(kind(fetch.fetch_id, answer, *luck))

    def _on_confirmed(self, fetch: Fetch, answer: Answer) -> None:
        if isinstance(answer, KVBusError):
            self.tell(ev.StepFailed(fetch.fetch_id, answer, self.world.random.random()))
        else:
            self.tell(ev.LeaseConfirmed(fetch.fetch_id))

    def _read_chunk(self, command: ev.ReadChunk) -> None:
        fetch = self.fetches[command.fetch_id]
        check(not fetch.outcome, 3, "an ended fetch reads", fetch)
        self.reading.start(fetch, command)

    def _report_fetched(self, report: ev.ReportFetched) -> None:
        fetch = self.fetches[report.fetch_id]
        check(not fetch.outcome, 4, "a fetch ends twice", fetch)
        has_asked = report.stage in ("confirming", "completed")
        grace_s = self.table.limits.confirm_grace_s if has_asked else 0.0
        is_late = self.process.time() > fetch.deadline + grace_s + SLACK_S
        check(not is_late or self.process.is_late, 4, "ended after its deadline", fetch)
        fetch.outcome = report.outcome
        self.world.note_end(fetch, report)
        if report.outcome is Outcome.COMPLETED:
            self._check_completed(fetch)
        if report.blocks_free:
            self._hand_back(fetch)
        else:
            self._drain(fetch)

    def _check_completed(self, fetch: Fetch) -> None:
        by = fetch.offer.completed_by
        check(by.startswith(f"{fetch.fetch_id}/"), 2, "completed without a yes", fetch)
        found = [fetch.memory.cells[block] for block in fetch.all_blocks()]
        check(found == fetch.wanted(), 2, "wrong bytes: {found}", fetch, found=found)

    def _report_blocks_freed(self, command: ev.ReportBlocksFreed) -> None:
        self._hand_back(self.fetches[command.fetch_id])

    def _hand_back(self, fetch: Fetch, outcome: str = "") -> None:
        """The engine's next request may write into the blocks."""
        fetch.outcome = fetch.outcome or outcome
        check(fetch.in_flight == 0, 3, "READs or copies can still land", fetch)
        fetch.memory.give_back(fetch.all_blocks())
        self.fetches.pop(fetch.fetch_id, None)
        fetch.offer.readers.remove(fetch)
        self.world.load.on_over(fetch)

    def _drain(self, fetch: Fetch) -> None:
        """Have its source drive what is in flight, until its blocks are free."""
        if self.fetches.get(fetch.fetch_id) is not fetch:
            return
        client, boot = self.client(fetch.offer.agent), fetch.offer.boot
        period_s = DRAIN_PERIOD_S
        client.ask(boot, period_s, lambda _: None, CheckMemory, 2 * period_s)
        self.process.after(period_s, self._drain, fetch)

    def _check_end(self, fetch: Fetch) -> None:
        if self.process.is_late:
            self.process.after(SLACK_S, self._check_end, fetch)
            return
        check(fetch.outcome, 4, "a fetch has not ended by its deadline", fetch)


def _altered(table: BlockTable) -> BlockTable:
    return BlockTable.of(table.array()[::-1], first_block=table.first_block)
