"""The options of ``kvbus demo``, and the run that they describe. It imports no torch."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbus.demo.model_config import (
    MAX_KV_HEADS,
    MAX_TOKENS,
    MAX_TP,
    NUM_LAYERS,
    Attention,
    ModelConfig,
)
from kvbus.demo.prompts import encode, read_prompts
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
    MAPPED = "mapped"


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


RUN, MODEL = "Run", "Model"
BOTH, PREFILL, DECODE = "Both engines", "Prefill engine", "Decode engine"


def _number(panel: str, low: int, high: int, text: str) -> Any:
    return typer.Option(min=low, max=high, metavar="N", help=text, rich_help_panel=panel)


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, case_sensitive=False, metavar=metavar, help=text, rich_help_panel=panel
    )


_TP = "Ranks that share the KV heads."
_PP = f"Pipeline stages that share the {NUM_LAYERS} layers."
_CROSS_LAYER = "One region of all layers."
_MEMORY = "Shared with the agent, or the engine's own, copied through a ring of host blocks."
_LAYOUT, _BLOCK_SIZE = "Instead of --layout.", "Instead of --block-size."
_SIZES = 1, MAX_TOKENS
_RING = "Size of a ring of host blocks, as a part of the engine's cache; half, or a request."


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run; requests take the prompts in turn. Raises `ConfigError` for what cannot be run."""

    requests: Annotated[int, _number(RUN, 1, 100_000, "How many to serve.")] = 12
    concurrency: Annotated[int, _number(RUN, 1, 256, "How many at a time.")] = 4
    max_new_tokens: Annotated[
        int, _number(RUN, 1, MAX_TOKENS - 1, "Tokens to generate for each request.")
    ] = 24
    prompt_file: Annotated[
        Path | None,
        _option(RUN, "Prompts, one a line, instead of the built-in ones.", metavar="FILE"),
    ] = None
    keep_logs: Annotated[
        Path | None, _option(RUN, "Keep the logs of the four processes there.", metavar="DIR")
    ] = None
    keys: Annotated[
        bool, _option(RUN, "Give the agents CURVE keys: encrypted, and by role.", "--keys")
    ] = False
    as_one_json: Annotated[
        bool, _option(RUN, "Print one JSON object, as the last line of stdout.", "--json")
    ] = False

    layout: Annotated[Layout, _option(BOTH, "Order of the axes within a block.")] = Layout.NHD
    block_size: Annotated[int, _number(BOTH, *_SIZES, "Tokens in a block of the KV caches.")] = 16
    cross_layer: Annotated[bool, _option(BOTH, _CROSS_LAYER, "--cross-layer/--per-layer")] = False
    ring_share: Annotated[
        float | None, typer.Option(min=0.01, max=1.0, help=_RING, rich_help_panel=BOTH)
    ] = None

    prefill_tp: Annotated[int, _number(PREFILL, 1, MAX_TP, _TP)] = 1
    prefill_pp: Annotated[int, _number(PREFILL, 1, NUM_LAYERS, _PP)] = 1
    prefill_layout: Annotated[Layout | None, _option(PREFILL, _LAYOUT)] = None
    prefill_block_size: Annotated[int | None, _number(PREFILL, *_SIZES, _BLOCK_SIZE)] = None
    prefill_cross_layer: Annotated[
        bool, _option(PREFILL, _CROSS_LAYER, "--prefill-cross-layer")
    ] = False
    prefill_memory: Annotated[Memory, _option(PREFILL, _MEMORY)] = Memory.SHARED
    prefill_chunk: Annotated[
        int | None,
        _number(PREFILL, *_SIZES, "Compute N tokens at a time; what is done is read meanwhile."),
    ] = None

    decode_tp: Annotated[int, _number(DECODE, 1, MAX_TP, _TP)] = 1
    decode_pp: Annotated[int, _number(DECODE, 1, NUM_LAYERS, _PP)] = 1
    decode_layout: Annotated[Layout | None, _option(DECODE, _LAYOUT)] = None
    decode_block_size: Annotated[int | None, _number(DECODE, *_SIZES, _BLOCK_SIZE)] = None
    decode_cross_layer: Annotated[bool, _option(DECODE, _CROSS_LAYER, "--decode-cross-layer")] = (
        False
    )
    decode_memory: Annotated[Memory, _option(DECODE, _MEMORY)] = Memory.SHARED
    path: Annotated[
        ReadPath, _option(DECODE, "How the agent reads; auto: by its rule.", "--path")
    ] = ReadPath.AUTO

    attention: Annotated[
        Attention,
        _option(MODEL, "Cache K and V of some heads, or one latent that all ranks have."),
    ] = Attention.GQA
    kv_heads: Annotated[
        int | None,
        _number(MODEL, 1, MAX_KV_HEADS, "KV heads of each layer, 4 unless told otherwise."),
    ] = None
    window: Annotated[
        int | None,
        _number(MODEL, 2, MAX_TOKENS, "Every other layer attends to the last N tokens only."),
    ] = None
    seed: Annotated[int, _number(MODEL, 0, 2**32, "Seed of the weights.")] = 0
    flip_one_byte: Annotated[bool, typer.Option("--flip-one-byte", hidden=True)] = False
    """A negative control."""

    def __post_init__(self) -> None:
        if self.attention is Attention.MLA and self.kv_heads is not None:
            raise ConfigError(
                "--kv-heads is for --attention gqa: with mla, all heads share one latent"
            )
        if self.max_prompt_tokens + self.max_new_tokens > MAX_TOKENS:
            raise ConfigError(
                f"a prompt of {self.max_prompt_tokens} tokens and {self.max_new_tokens} new ones"
                f" are more than the {MAX_TOKENS} tokens that the model can take"
            )
        has_ring = Memory.HOST in (self.prefill_memory, self.decode_memory)
        if has_ring and self.share_in_ring * self.concurrency < 1:
            raise ConfigError(
                f"a ring of {self.ring_share:g} of a cache for {self.concurrency} requests does not"
                " hold the longest of them: raise --ring-share or --concurrency"
            )

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """Those of the file, or the built-in ones."""
        return read_prompts(self.prompt_file)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(encode(prompt)) for prompt in self.prompts)

    @property
    def share_in_ring(self) -> float:
        """The part of an engine's cache that its ring of host blocks holds, if it has one."""
        return self.ring_share or max(0.5, 1 / self.concurrency)

    @property
    def model(self) -> ModelConfig:
        """The model of both engines."""
        return ModelConfig(
            seed=self.seed,
            attention=self.attention,
            kv_heads=self.kv_heads or ModelConfig.kv_heads,
            window=self.window,
        )

    def shape(self, role: str) -> EngineShape:
        """The engine's own options, or else those of both."""
        either = ("layout", "block_size", "cross_layer")
        return EngineShape(
            **{name: getattr(self, f"{role}_{name}") for name in ("tp", "pp", "memory")},
            **{name: getattr(self, f"{role}_{name}") or getattr(self, name) for name in either},
        )
