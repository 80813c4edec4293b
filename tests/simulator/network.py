"""Requests and their replies, as `kvbus.bus` makes them, over a network that does what it wants.

Who asks asks again with the same number until its timeout; who answers keeps its replies, and says
them again to a repeat. What asks and answers here follows `kvbus.bus.client` and
`kvbus.bus.server`, without their frames.
"""

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

from kvbus.bus.boot import BootChange, BootWatch
from kvbus.bus.replies import KeptReply, ReplyCache
from kvbus.bus.sender import Sender
from kvbus.errors import ErrorCode, KVBusError, PeerLost, RequestRefused, RequestTimeout
from kvbus.protocol import Message
from tests.simulator.clock import Clock, Process
from tests.simulator.settings import NetworkSettings

RETRY_S, MAX_RETRY_S = 0.25, 2.0
Outcome = Message | KVBusError
OnReply = Callable[[Outcome], None]


class Network:
    """Carries calls to processes: late, twice, out of order, or not at all."""

    def __init__(
        self, clock: Clock, random: Random, settings: NetworkSettings, counts: Counter[str]
    ) -> None:
        self._clock, self._random, self._settings = clock, random, settings
        self.counts = counts
        self.is_good = False
        """Nothing is lost any more."""

    def send(self, to: Process, call: Callable[..., Any], *args: Any) -> None:
        """Have ``call`` made by whoever lives there when it arrives."""
        settings, random = self._settings, self._random.random
        self.counts["messages"] += 1
        if not self.is_good and random() < settings.loss:
            self.counts["lost"] += 1
            return
        for _ in range(2 if random() < settings.duplicates else 1):
            delay_s = settings.delay_s * (0.5 + random())
            if random() < settings.slow:
                delay_s += settings.slow_s * random()
            self._clock.at(self._clock.now + delay_s, call, *args, process=to)


class Request:
    """One request of a client, on its way and at its server; ``event`` is what it asks."""

    __slots__ = ("boot", "client", "event", "interval_s", "life", "number", "on_reply", "server")

    def __init__(self, client: "Client", number: int, boot: str, on_reply: OnReply) -> None:
        self.client, self.number, self.boot, self.on_reply = client, number, boot, on_reply
        self.life = client.process.life
        self.interval_s = RETRY_S
        self.event: Any = None
        self.server: Server | None = None

    def reply(self, message: Message) -> None:
        """Answer ``ok``."""
        self._answer(message)

    def refuse(self, error: KVBusError) -> None:
        """Answer with an error; a copy, as one that is raised again would grow."""
        self._answer(RequestRefused(error.message, code=error.code, **error.detail))

    def _answer(self, outcome: Outcome) -> None:
        assert self.server is not None, "answered before it has arrived"
        self.server.answer(self, outcome)


class Client:
    """What one decode agent asks one prefill agent: `RequestClient` without sockets.

    ``on_lost`` is told the boot of a process that came back as another.
    """

    def __init__(
        self,
        network: Network,
        process: Process,
        server: "Server",
        *,
        boot: str,
        on_lost: Callable[[str], None],
    ) -> None:
        self._network, self.process, self._server, self._on_lost = network, process, server, on_lost
        self.sender = Sender("", boot, boot)
        self.watch = BootWatch()
        self._pending: dict[int, Request] = {}
        self._last_number = 0

    def ask(
        self,
        boot: str,
        timeout_s: float,
        on_reply: OnReply,
        kind: Callable[..., Any],
        *args: Any,
        **named: Any,
    ) -> None:
        """Ask the process ``boot`` for ``kind(*args, **named)``; ``on_reply`` is called once."""
        self._last_number += 1
        request = Request(self, self._last_number, boot, on_reply)
        request.event = kind(*args, reply_to=request, **named)
        self._pending[request.number] = request
        self._network.counts[kind.__name__] += 1
        self._network.send(self._server.process, self._server.receive, request)
        deadline = self.process.time() + timeout_s
        self.process.after(min(RETRY_S, timeout_s), self._look, request, deadline)

    def _look(self, request: Request, deadline: float) -> None:
        """It was not answered in time: ask again, or give up."""
        if request.number not in self._pending:
            return
        left_s = deadline - self.process.time()
        if left_s <= 1e-9:
            self._network.counts["timeouts"] += 1
            self._settle(request.number, RequestTimeout("no reply"))
            return
        self._network.counts["retries"] += 1
        self._network.send(self._server.process, self._server.receive, request)
        request.interval_s = min(2 * request.interval_s, MAX_RETRY_S)
        self.process.after(min(request.interval_s, left_s), self._look, request, deadline)

    def on_answer(self, boot: str, life: int, number: int, outcome: Outcome) -> None:
        """A reply; of those to one request the first counts."""
        if life == self.process.life and self.hear(boot):
            self._settle(number, outcome)

    def hear(self, boot: str) -> bool:
        """A sign of life of the process ``boot``; False when it is an old one's."""
        before = self.watch.current
        change = self.watch.see(boot)
        if change is BootChange.CHANGED and before is not None:
            for number in list(self._pending):
                self._settle(number, PeerLost("peer came back as a new process"))
            self._on_lost(before)
        return change is not BootChange.RETIRED

    def _settle(self, number: int, outcome: Outcome) -> None:
        request = self._pending.pop(number, None)
        if request is not None:
            request.on_reply(outcome)


class Server:
    """What one prefill agent answers: `RequestServer` without sockets."""

    def __init__(
        self,
        network: Network,
        process: Process,
        *,
        boot: str,
        max_replies: int,
        handle: Callable[[Request], None],
    ) -> None:
        self._network, self.process, self._handle = network, process, handle
        self._max_replies = max_replies
        self.start(boot)

    def start(self, boot: str) -> None:
        """A new process, which knows nothing of the one before."""
        self.boot = boot
        self._pending: set[tuple[Sender, int]] = set()
        self._evicted: dict[Sender, int] = {}
        self._replies = ReplyCache(max_replies=self._max_replies, max_bytes=1 << 62)

    def receive(self, request: Request) -> None:
        """A request has arrived, for the first time or again."""
        sender, number = request.client.sender, request.number
        key, counts = (sender, number), self._network.counts
        kept = self._replies.get(key)
        if kept is not None:
            counts["repeats"] += 1
            self._post(request, kept.frame[0])
        elif key in self._pending:
            counts["repeats"] += 1
        elif number <= self._evicted.get(sender, 0):
            counts["forgotten"] += 1
            self._post(request, RequestRefused("older than the replies", code=ErrorCode.STALE))
        else:
            self._pending.add(key)
            request.server = self
            if request.boot != self.boot:
                counts["stale"] += 1
                request.refuse(RequestRefused("for an earlier process", code=ErrorCode.STALE))
            else:
                self._handle(request)

    def answer(self, request: Request, outcome: Outcome) -> None:
        """The end of a request; one that an earlier process was asked has no end."""
        key = request.client.sender, request.number
        if key not in self._pending:
            return
        self._pending.discard(key)
        request.event = None  # else the two of them live on until they are found by the collector
        kept: Any = (outcome,)  # in the place of a frame
        reply = KeptReply(kept, 0, self.process.time())
        for evicted, number in self._replies.put(key, reply, key[0]):
            self._evicted[evicted] = max(number, self._evicted.get(evicted, 0))
        if isinstance(outcome, KVBusError) and outcome.code is ErrorCode.BUSY:
            self._network.counts["busy"] += 1
        self._post(request, outcome)

    def _post(self, request: Request, outcome: Outcome) -> None:
        client = request.client
        args = self.boot, request.life, request.number, outcome
        self._network.send(client.process, client.on_answer, *args)
