"""The options of ``kvbus demo``, and the engines that they describe. It imports no torch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import typer
from msgspec import Meta, to_builtins

from kvbus.demo.prompts import encode, read_prompts
from kvbus.errors import ConfigError
from kvbus.geometry import EngineSpec
from kvbus.planning.choose import Path
from kvbus.spec_text import EngineWords, ModelWords, read_words

MAX_TP = 8  # the model has at least as many query heads
MAX_KV_HEADS = 32
NUM_LAYERS = 4
HEAD_DIM = 64
MAX_TOKENS = 4096  # prompt and output together


class SideWords(EngineWords, kw_only=True):
    """What one engine has of its own.

    With a ``ring`` its cache is memory that no agent maps, as on a device, and KV passes through
    host blocks, so large a part of the cache.
    """

    tp: Annotated[int, Meta(ge=1, le=MAX_TP)] = 1
    pp: Annotated[int, Meta(ge=1, le=NUM_LAYERS)] = 1
    block: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 16
    ring: Annotated[float, Meta(gt=0, le=1)] | None = None

    def __str__(self) -> str:
        words = to_builtins(self)
        return " ".join(f"{key}={word}" for key, word in words.items() if word not in (None, False))


RUN, ENGINES, MODEL = "Run", "Engines", "Model"


def _number(panel: str, low: int, high: int, text: str) -> Any:
    return typer.Option(min=low, max=high, metavar="N", help=text, rich_help_panel=panel)


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(
        *names, case_sensitive=False, metavar=metavar, help=text, rich_help_panel=panel
    )


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """One run; requests take the prompts in turn. Raises `ConfigError` for what cannot be run."""

    requests: Annotated[int, _number(RUN, 1, 100_000, "How many to serve.")] = 12
    concurrency: Annotated[int, _number(RUN, 1, 256, "How many at a time.")] = 4
    max_new_tokens: Annotated[
        int, _number(RUN, 1, MAX_TOKENS - 1, "Tokens to generate for each request.")
    ] = 24
    prompt_file: Annotated[
        FilePath | None,
        _option(RUN, "Prompts, one a line, instead of the built-in ones.", metavar="FILE"),
    ] = None
    keep_logs: Annotated[
        FilePath | None, _option(RUN, "Keep the logs of the four processes there.", metavar="DIR")
    ] = None
    keys: Annotated[
        bool, _option(RUN, "Give the agents CURVE keys: encrypted, and by role.", "--keys")
    ] = False
    as_one_json: Annotated[
        bool, _option(RUN, "Print one JSON object, as the last line of stdout.", "--json")
    ] = False

    prefill: Annotated[str, _option(ENGINES, "The prefill engine.", metavar="SPEC")] = ""
    decode: Annotated[str, _option(ENGINES, "The decode engine.", metavar="SPEC")] = ""
    prefill_chunk: Annotated[
        int | None,
        _number(ENGINES, 1, MAX_TOKENS, "Compute N tokens at a time; meanwhile they are read."),
    ] = None
    path: Annotated[
        Path | None, _option(ENGINES, "Have all read in this way; else the agent's rule says how.")
    ] = None

    attention: Annotated[
        Literal["gqa", "mla"],
        _option(MODEL, "Cache K and V of some heads, or one latent that all ranks have."),
    ] = "gqa"
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
        if self.attention == "mla" and self.kv_heads is not None:
            raise ConfigError(
                "--kv-heads is for --attention gqa: with mla, all heads share one latent"
            )
        if self.max_prompt_tokens + self.max_new_tokens > MAX_TOKENS:
            raise ConfigError(
                f"a prompt of {self.max_prompt_tokens} tokens and {self.max_new_tokens} new ones"
                f" are more than the {MAX_TOKENS} tokens that the model can take"
            )
        for role, words in self.sides.items():
            if words.ring is not None and words.ring * self.concurrency < 1:
                raise ConfigError(
                    f"--{role}: a ring of {words.ring:g} of a cache for {self.concurrency} requests"
                    " does not hold the longest of them: raise ring or --concurrency"
                )

    @cached_property
    def sides(self) -> dict[str, SideWords]:
        """The words of both engines."""
        return {
            role: read_words(f"--{role}", getattr(self, role), SideWords)
            for role in ("prefill", "decode")
        }

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        """Those of the file, or the built-in ones."""
        return read_prompts(self.prompt_file)

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(encode(prompt)) for prompt in self.prompts)

    def spec(self, engine_id: str, words: EngineWords | None = None) -> EngineSpec:
        """An engine of this model."""
        words = words or EngineWords()
        whole = ModelWords(
            layers=NUM_LAYERS,
            head=HEAD_DIM,
            kv_heads=0 if self.attention == "mla" else self.kv_heads or 4,
            attention=self.attention,
            window=self.window,
            model=f"kvbus-demo@seed-{self.seed}",
            tp=words.tp,
            pp=words.pp,
            block=words.block,
        )
        return whole.engine(engine_id)
