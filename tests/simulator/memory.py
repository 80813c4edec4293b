"""The memory of engines, block by block, and what offers and fetches have of it.

Each write of a block leaves another number there: equal numbers are equal bytes. A block that is
given back is written over in the same step, as its next owner would.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbus.geometry import BlockTable
from kvbus.protocol import Outcome
from tests.simulator.checker import check

if TYPE_CHECKING:
    from tests.simulator.decode import DecodeAgent
    from tests.simulator.prefill import PrefillAgent

BLOCK_SIZE = 16


class Memory:
    """The KV cache of one engine: what stands in each block, and whose it is."""

    _writes: Iterator[int]

    def __init__(self, num_blocks: int, writes: Iterator[int]) -> None:
        self._writes = writes
        self.cells = [0] * num_blocks
        self.owners: list[object] = [None] * num_blocks
        self.free = list(range(num_blocks))

    def take(self, num_blocks: int, owner: object) -> list[int]:
        """Free blocks, for their new owner; there must be so many."""
        blocks = [self.free.pop() for _ in range(num_blocks)]
        for block in blocks:
            self.owners[block] = owner
        return blocks

    def write(self, block: int) -> int:
        """Other bytes than ever before."""
        number = self.cells[block] = next(self._writes)
        return number

    def give_back(self, blocks: list[int]) -> None:
        """The next owner may write, and does."""
        for block in blocks:
            self.owners[block] = None
            self.cells[block] = next(self._writes)
        self.free.extend(blocks)

    def land(self, block: int, content: int, owner: object) -> None:
        """Bytes arrive for ``owner``."""
        check(self.owners[block] is owner, 3, "bytes land in a block that was handed back", owner)
        self.cells[block] = content


@dataclass(eq=False, slots=True)
class Offer:
    """One offer of a prefill engine, as the engine and an onlooker see it.

    ``reserved`` are all of its blocks, ``blocks`` those that the engine has written to, and
    ``written`` what. ``told`` once the agent knows of it, ``waits_until`` without a reader.
    ``leased`` is the epoch of the live lease, ``leased_until`` the latest end that its reader was
    told, ``completed_by`` the token of who was told yes. Times are the agent's own.
    """

    agent: "PrefillAgent"
    memory: Memory
    offer_id: str
    num_tokens: int
    reserved: list[int]
    state_block: int | None
    ttl_s: float
    boot: str
    transfer_id: str = ""
    sealed: bool = False
    ticket_tables: dict[str, BlockTable] = field(default_factory=dict)
    told: bool = False
    blocks: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    num_ready: int = 0
    state_written: int = 0
    waits_until: float = 0.0
    leased: int = 0
    leased_until: float = 0.0
    lease_began: float = 0.0
    last_epoch: int = 0
    outcome: Outcome | str = ""
    completed_by: str = ""
    readers: list["Fetch"] = field(default_factory=list)

    def write(self, num_blocks: int) -> None:
        """The engine computes so many blocks more, and the state after them."""
        start = len(self.blocks)
        for block in self.reserved[start : start + num_blocks]:
            self.blocks.append(block)
            self.written.append(self.memory.write(block))
        if self.state_block is not None:
            self.state_written = self.memory.write(self.state_block)
        self.num_ready = min(self.num_tokens, BLOCK_SIZE * len(self.blocks))

    def table(self, start: int = 0) -> BlockTable:
        """The block table from block ``start`` on, of what is written."""
        ids = b"".join(block.to_bytes(4, "little") for block in self.blocks[start:])
        return BlockTable(ids, first_block=start)

    def tables(self) -> dict[str, BlockTable]:
        """All block tables, of what is written."""
        tables = {"full": self.table()}
        if self.state_block is not None:
            tables["state"] = BlockTable(self.state_block.to_bytes(4, "little"))
        return tables

    def story(self) -> list[str]:
        """What its agent did with it."""
        table = self.agent.table
        return [f"offer {self.offer_id} at {self.agent.name}:", *table.story(self.offer_id)]


@dataclass(eq=False, slots=True)
class Fetch:
    """One fetch of a decode engine; ``blocks`` are what it is read into.

    ``kind`` names the path, ``in_flight`` counts what can still write into the blocks. One that
    ``compares`` has its bytes proved by digests.
    """

    agent: "DecodeAgent"
    memory: Memory
    offer: Offer
    fetch_id: str
    first_token: int
    blocks: list[int]
    state_block: int | None
    deadline: float
    kind: str
    asked_at: float
    compares: bool = False
    in_flight: int = 0
    num_claims: int = 0
    outcome: Outcome | str = ""
    is_second: bool = False

    def story(self) -> list[str]:
        """What its agent did with it, and with its offer."""
        agent, fetch_id = self.agent, self.fetch_id
        own = [f"fetch {fetch_id} at {agent.name}:", *agent.table.story(fetch_id)]
        reads = [f"read  {line}" for line in agent.reading.table.story(fetch_id)]
        return own + reads + self.offer.story()

    def all_blocks(self) -> list[int]:
        """Everything that it is read into."""
        return self.blocks if self.state_block is None else [*self.blocks, self.state_block]

    def wanted(self) -> list[int]:
        """What must stand in `all_blocks` when it is completed."""
        offer = self.offer
        written = offer.written[self.first_token // BLOCK_SIZE :]
        has_state = self.state_block is not None and offer.num_tokens > self.first_token
        return [*written, offer.state_written] if has_state else written
