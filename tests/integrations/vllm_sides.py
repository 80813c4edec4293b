"""The connector's threads and real agents, without vLLM: what its scheduler does, by hand."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvbus.bus import new_secret
from kvbus.engine import KvCache, SharedStorage, share_tensor
from kvbus.geometry import EngineSpec, GroupSpec, KvLayout, lay_out_rank
from kvbus.integrations.vllm.loads import Load, Loads
from kvbus.integrations.vllm.offers import Offers
from kvbus.integrations.vllm.sessions import ControlLink, MemoryLink, control_link, memory_link
from kvbus.integrations.vllm.stats import StatsRecorder
from kvbus.integrations.vllm.transfer_params import HandoffParams
from kvbus.protocol import Rendezvous
from tests.agents import AgentProcess, wait_until
from tests.strict_sessions import bits

GROUP = GroupSpec("full", (0, 1), 16, 2, 8, "float32")
NUM_BLOCKS = 32
PROMPT_TOKENS = 40
BLOCKS = [[7, 3, 9]]
LOADED_BLOCKS = [[1, 2, 4]]


@dataclass(frozen=True)
class Registered:
    """An engine's memory, which its agent has while the link is up."""

    cache: KvCache
    storage: SharedStorage
    link: MemoryLink


@dataclass
class Side:
    """One engine: its memory, its links, its loads and offers, and all that these have reported."""

    spec: EngineSpec
    memory: Registered
    control: ControlLink
    stats: StatsRecorder
    loads: Loads
    offers: Offers
    sent: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    over: list[str] = field(default_factory=list)

    def step(self) -> None:
        """As each step of vLLM does."""
        failed, over = self.loads.take_ended()
        self.failed += failed
        self.over += over
        self.sent += [offer.request_id for offer in self.offers.take_released()]

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Step until ``condition`` holds."""

        def stepped() -> Any:
            self.step()
            return condition()

        wait_until(stepped, what)

    def blocks(self, ids: list[int]) -> torch.Tensor:
        """A copy of these blocks of every layer and part."""
        parts = [
            self.memory.cache.view(layer, part) for layer in GROUP.layers for part in GROUP.parts
        ]
        return torch.stack([bits(part)[ids] for part in parts])

    def is_up(self) -> bool:
        return self.memory.link.wait_open(0) and self.control.wait_open(0)

    def offered(
        self,
        request_id: str,
        num_tokens: int = PROMPT_TOKENS,
        block_ids: list[list[int]] = BLOCKS,
        *,
        readers: int = 1,
    ) -> HandoffParams:
        """What the router gets once the request was computed."""
        self.offers.reserve(request_id, readers=readers)
        self.until(
            lambda: ticket_of(self.offers, request_id), f"a ticket for {request_id} is there"
        )
        ticket = self.offers.publish(request_id, block_ids, num_tokens)
        assert ticket is not None
        return HandoffParams(ticket, num_tokens, "")

    def meet(self, request_id: str, reads_from: AgentProcess) -> str:
        """Begin to load a request that nobody has offered; the name that its offer is to have."""
        meets = Rendezvous(uuid.uuid4().hex, reads_from.peer)
        self.load(request_id, HandoffParams(meets.to_json(), PROMPT_TOKENS, ""))
        return meets.transfer_id

    def load(
        self,
        request_id: str,
        handoff: HandoffParams,
        num_local_tokens: int = 0,
        block_ids: list[list[int]] = LOADED_BLOCKS,
    ) -> None:
        """Expect, match and start a load."""
        self.loads.expect(Load(request_id, handoff.remote_num_tokens, handoff))
        num_tokens = self.loads.matched(request_id, num_local_tokens)
        assert num_tokens is not None, "no other request loads by this ticket"
        self.loads.start(request_id, block_ids, num_tokens)


def ticket_of(offers: Offers, request_id: str) -> dict[str, Any] | None:
    """The ticket of a request that is being computed, as soon as there is one."""
    offer = offers.reserve(request_id).offer
    return offer.ticket if offer is not None else None


@contextmanager
def memory_of(
    path: Path, spec: EngineSpec, num_blocks: int = NUM_BLOCKS, *, also_at: Sequence[Path] = ()
) -> Iterator[Registered]:
    """The memory of an engine of one rank, full of random bytes, for the agent at ``path``.

    And for those ``also_at``, where the engine has several.
    """
    rank = lay_out_rank(spec, 0, KvLayout.parse("NHD"), num_blocks=num_blocks)
    segment = rank.segments[0]
    buffer = torch.randint(0, 255, (segment.size_bytes,), dtype=torch.uint8)
    storage = share_tensor(buffer)
    assert isinstance(storage, SharedStorage)
    storages = {segment.segment_id: storage}
    links = [
        memory_link(each, spec, rank, storages, access=new_secret()) for each in (path, *also_at)
    ]
    try:
        yield Registered(KvCache(spec, rank, buffer), storage, links[0])
    finally:
        for link in links:
            link.close()
        storage.close()


@contextmanager
def side_of(
    path: Path,
    name: str,
    *,
    ttl_s: float | None = None,
    num_blocks: int = NUM_BLOCKS,
    fetch_timeout_s: float = 30.0,
) -> Iterator[Side]:
    """A new engine whose agent has its attach socket at ``path``, there or not."""
    spec = EngineSpec(f"{name}-{uuid.uuid4().hex}", "model", 1, (GROUP,))
    with memory_of(path, spec, num_blocks) as memory:
        stats = StatsRecorder()
        control = control_link(path, spec, ())
        offers = Offers(spec, control, stats, ttl_s=ttl_s)
        loads = Loads(spec, control, stats, timeout_s=fetch_timeout_s)
        try:
            yield Side(spec, memory, control, stats, loads, offers)
        finally:
            control.close()


@contextmanager
def both_sides(
    prefill: AgentProcess,
    decode: AgentProcess,
    *,
    ttl_s: float | None = None,
    num_blocks: int = NUM_BLOCKS,
    fetch_timeout_s: float = 30.0,
) -> Iterator[tuple[Side, Side]]:
    """A prefill engine and a decode engine that their agents know."""
    with (
        side_of(prefill.attach, "p", ttl_s=ttl_s, num_blocks=num_blocks) as offering,
        side_of(
            decode.attach, "d", num_blocks=num_blocks, fetch_timeout_s=fetch_timeout_s
        ) as loading,
    ):
        wait_until(lambda: offering.is_up() and loading.is_up(), "both engines are registered")
        yield offering, loading
