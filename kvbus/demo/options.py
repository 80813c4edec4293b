"""What a run of the demo is: its prompts, its model, its two engines, and what it keeps.

Refuses, with a `ConfigError` that says what is wrong, prompts that the model cannot take.
"""

from dataclasses import dataclass, field
from pathlib import Path

from kvbus.demo.shape import Memory, ModelShape, ReadPath, Side
from kvbus.errors import ConfigError

MAX_TOKENS = 4096  # of the model: prompt and output together


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run; requests take the prompts in turn.

    ``path`` forces how the decode agent reads; ``prefill_chunk`` is how many tokens the prefill
    engine computes before it offers them, None: all. ``ring_share`` is the size of the ring of an
    engine whose memory is on its host, as a part of its cache. ``flip_one_byte`` is a negative
    control.
    """

    prompts: tuple[str, ...]
    num_requests: int = 12
    concurrency: int = 4
    model: ModelShape = field(default_factory=ModelShape)
    prefill: Side = field(default_factory=Side)
    decode: Side = field(default_factory=Side)
    path: ReadPath = ReadPath.AUTO
    prefill_chunk: int | None = None
    ring_share: float = 0.5
    max_new_tokens: int = 24
    keep_logs: Path | None = None
    flip_one_byte: bool = False

    def __post_init__(self) -> None:
        if self.max_prompt_tokens + self.max_new_tokens > MAX_TOKENS:
            raise ConfigError(
                f"a prompt of {self.max_prompt_tokens} tokens and {self.max_new_tokens} new ones"
                f" are more than the {MAX_TOKENS} tokens that the model can take"
            )
        if self._has_ring and self.ring_share * self.concurrency < 1:
            raise ConfigError(
                f"a ring of {self.ring_share:g} of a cache for {self.concurrency} requests does not"
                " hold the longest of them: raise --ring-share or --concurrency"
            )

    @property
    def _has_ring(self) -> bool:
        return Memory.HOST in (self.prefill.memory, self.decode.memory)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(num_tokens, self.prompts))

    def prompt(self, request: int) -> str:
        """The prompt of request number ``request``."""
        return self.prompts[request % len(self.prompts)]


def num_tokens(prompt: str) -> int:
    """Tokens of a prompt: its UTF-8 bytes."""
    return len(prompt.encode())
