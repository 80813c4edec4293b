"""What a run of the demo is: its prompts, its two engines, and what it keeps.

Refuses, with a `ConfigError` that says what is wrong, prompts that the model cannot take.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvbus.errors import ConfigError
from kvbus.geometry import num_blocks_for

MAX_TOKENS = 4096  # of the model: prompt and output together


class Layout(StrEnum):
    """The order of the axes within a block of the caches."""

    NHD = "NHD"
    HND = "HND"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run; requests take the prompts in turn. ``flip_one_byte`` is a negative control."""

    prompts: tuple[str, ...]
    num_requests: int = 12
    concurrency: int = 4
    prefill_tp: int = 1
    decode_tp: int = 1
    block_size: int = 16
    layout: Layout = Layout.NHD
    cross_layer: bool = False
    max_new_tokens: int = 24
    seed: int = 0
    keep_logs: Path | None = None
    flip_one_byte: bool = False

    def __post_init__(self) -> None:
        longest = max(map(num_tokens, self.prompts))
        if longest + self.max_new_tokens > MAX_TOKENS:
            raise ConfigError(
                f"a prompt of {longest} tokens and {self.max_new_tokens} new ones are more than"
                f" the {MAX_TOKENS} tokens that the model can take"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks of each cache: as many as the requests in flight need, so that all are reused."""
        longest = max(map(num_tokens, self.prompts)) + self.max_new_tokens
        return self.concurrency * num_blocks_for(longest, self.block_size)

    def prompt(self, request: int) -> str:
        """The prompt of request number ``request``."""
        return self.prompts[request % len(self.prompts)]


def num_tokens(prompt: str) -> int:
    """Tokens of a prompt: its UTF-8 bytes."""
    return len(prompt.encode())
