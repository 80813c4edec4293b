"""What a run of the demo is: its prompts, its model, its two engines. It imports no torch."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from kvbus.demo.model_config import MAX_TOKENS, ModelConfig
from kvbus.errors import ConfigError


class Layout(StrEnum):
    """The order of the axes within a block of a cache."""

    NHD = "NHD"
    HND = "HND"


class Memory(StrEnum):
    """Where an engine's cache is: in memory that its agent maps, or in memory of its own.

    Of the latter, as on a device, the engine copies blocks through a ring of host blocks.
    """

    SHARED = "shared"
    HOST = "host"


class ReadPath(StrEnum):
    """How bytes are moved: as the agent thinks best, or always in one way."""

    AUTO = "auto"
    DIRECT = "direct"
    PACKED = "packed"


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """The shape of one engine: ``tp`` ranks in each of ``pp`` stages, and their caches."""

    tp: int = 1
    pp: int = 1
    layout: Layout = Layout.NHD
    block_size: int = 16
    cross_layer: bool = False
    memory: Memory = Memory.SHARED

    def __str__(self) -> str:
        blocks = f"{self.layout} {self.block_size}" + " cross-layer" * self.cross_layer
        host = " host" * (self.memory is Memory.HOST)
        return f"tp={self.tp} pp={self.pp} {blocks}{host}"


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run; requests take the prompts in turn. Raises `ConfigError` for what cannot be run.

    ``path`` forces how the decode agent reads; ``prefill_chunk`` is how many tokens the prefill
    engine computes before it offers them, None: all. ``ring_share`` is the size of the ring of an
    engine whose memory is on its host, as a part of its cache. ``flip_one_byte`` is a negative
    control.
    """

    prompts: tuple[str, ...]
    num_requests: int = 12
    concurrency: int = 4
    model: ModelConfig = field(default_factory=ModelConfig)
    prefill: EngineShape = field(default_factory=EngineShape)
    decode: EngineShape = field(default_factory=EngineShape)
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
        has_ring = Memory.HOST in (self.prefill.memory, self.decode.memory)
        if has_ring and self.ring_share * self.concurrency < 1:
            raise ConfigError(
                f"a ring of {self.ring_share:g} of a cache for {self.concurrency} requests does not"
                " hold the longest of them: raise --ring-share or --concurrency"
            )

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
