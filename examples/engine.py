"""A toy engine in one file: ``python engine.py prefill|decode ATTACH_SOCKET``, one step at a time.

The prefill engine reads prompts from stdin, one a line, and prints a ticket for each; the decode
engine reads these tickets, and prints the prompts that it finds in the KV. The "model" has one
layer, whose K and V of a token are its number.
"""

import json
import select
import sys
from collections import deque
from typing import Any

import torch

from kvbus.engine import Fetch, Link, Offer, describe_tensors, prompt_digest
from kvbus.geometry import EngineSpec, GroupSpec

BLOCK, NUM_BLOCKS = 4, 64
GROUP = GroupSpec("all", (0,), block_size=BLOCK, num_kv_heads=1, head_dim=2, dtype="float32")


class Engine:
    """Blocks of a cache, and the requests that have some of them."""

    def __init__(self, role: str, attach_path: str) -> None:
        spec = EngineSpec(f"toy-{role}", model="toy@1", tp_size=1, groups=(GROUP,))
        self.cache = torch.zeros(2, NUM_BLOCKS, BLOCK, 1, 2)  # K and V, block, token, head, dim
        memory = describe_tensors({0: self.cache}, "kv block token head dim", engine=spec)
        self.link = Link(attach_path, spec, memory=memory, attach_timeout_s=30.0)
        self.free = deque(range(NUM_BLOCKS))
        self.blocks: dict[Offer | Fetch, list[int]] = {}
        self.wanted: dict[Fetch, int] = {}
        self.told: set[Offer | Fetch] = set()
        self.lines: deque[str] = deque()

    def take(self, num_tokens: int) -> list[int]:
        return [self.free.popleft() for _ in range(-(-num_tokens // BLOCK))]

    def prefill(self, line: str) -> None:
        """Compute a prompt in two chunks, and offer it before the first."""
        tokens = list(line.encode())
        if len(tokens) > BLOCK * NUM_BLOCKS:
            print(f"the cache has no room for {len(tokens)} tokens", file=sys.stderr)
            return
        if len(tokens) > BLOCK * len(self.free):
            self.lines.appendleft(line)  # wait until a reader has the KV of another prompt
            return
        blocks = self.take(len(tokens))
        digest = prompt_digest(tokens)
        offer = self.link.offer(
            f"request-{id(blocks)}",
            num_tokens=0,
            block_ids={"all": blocks},
            sealed=False,
            prompt_digest=digest,
        )
        self.blocks[offer] = blocks
        rows = self.cache[:, blocks].flatten(1, 2)
        for stop in (len(tokens) // 2, len(tokens)):
            rows[:, :stop] = torch.tensor(tokens[:stop])[None, :, None, None]
            self.cache[:, blocks] = rows.unflatten(1, (-1, BLOCK))
            offer.extend(stop)
        offer.seal()
        told = {"ticket": offer.ticket, "num_tokens": len(tokens), "digest": digest}
        print(json.dumps(told), flush=True)

    def decode(self, line: str) -> None:
        """Have the KV of a prompt fetched into blocks of this engine."""
        asked: dict[str, Any] = json.loads(line)
        num_tokens = asked["num_tokens"]
        if num_tokens > BLOCK * len(self.free):
            self.link.release(asked["ticket"])  # there is no room: whoever offered it goes on
            print("no room", flush=True)
            return
        blocks = self.take(num_tokens)
        fetch = self.link.fetch(
            asked["ticket"],
            num_tokens=num_tokens,
            block_ids={"all": blocks},
            prompt_digest=asked["digest"],
        )
        self.blocks[fetch], self.wanted[fetch] = blocks, num_tokens

    def step(self) -> None:
        """What a step of an engine does besides computing: hear what has ended."""
        for one in self.link.ended():
            if isinstance(one, Fetch) and one not in self.told:
                self.told.add(one)
                print(self.answer(one), flush=True)
            if isinstance(one, Offer) or one.are_blocks_free:
                self.free.extend(self.blocks.pop(one))
                self.told.discard(one)

    def answer(self, fetch: Fetch) -> str:
        if (failure := fetch.ended.exception()) is not None:
            return f"failed: {failure}"
        keys = self.cache[0, self.blocks[fetch]].flatten(0, 1)[: self.wanted.pop(fetch), 0, 0]
        return bytes(keys.int().tolist()).decode()

    def run(self, role: str) -> None:
        with open(0, "rb", buffering=0) as stdin, self.link:  # select sees no buffered line
            while self.blocks or self.lines or not stdin.closed:
                self.step()
                if select.select([] if stdin.closed else [stdin], [], [], 0.01)[0]:
                    line = stdin.readline().decode()
                    self.lines.append(line.strip()) if line else stdin.close()
                if self.lines:
                    getattr(self, role)(self.lines.popleft())


if __name__ == "__main__":
    Engine(*sys.argv[1:]).run(sys.argv[1])
