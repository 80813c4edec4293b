"""Options of ``kvbus demo``, and the setup of its engines. It imports no torch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path as FilePath
from typing import Annotated, Any

import typer
from msgspec import Meta, Struct, to_builtins

from kvbus.errors import ConfigError, reason_of
from kvbus.geometry import EngineSpec, KvLayout
from kvbus.planning.choose import Path
from kvbus.spec_text import EngineFields, ModelFields, gpu_number, read_fields

MAX_TP = 8  # the model has at least as many query heads
MAX_KV_HEADS = 32
NUM_LAYERS = 4
HEAD_DIM = 64
MAX_TOKENS = 4096  # prompt and output together
CPU = "cpu"
BUILT_IN = (
    "The KV cache of a prompt is computed once and read for every token after it.",
    "Explain to a patient friend why prefill is bound by compute and decode by memory bandwidth, "
    "and what follows from that for the machines that each of them should run on. Take your time, "
    "use examples from everyday life, and end with one sentence that fits on a postcard.",
    "Schreibe ein kurzes Gedicht über Züge, die nachts Güter über die Grenze bringen.",
    "def handoff(ticket, blocks):\n    '''Move the bytes, then ask whether they may be used.'''\n",
    "A lease has an epoch. Whoever reads under it asks, after the last byte landed, whether the "
    "epoch was still live; only a yes makes the bytes valid. Summarise this paragraph, then list "
    "three ways in which a reader can be late: it was stopped by the scheduler, the network kept "
    "its packets for a while, or its own clock ran at another speed than it believed. For each of "
    "them say which process notices, and what it does with the blocks.",
    "猫が静かに窓辺で眠っている。朝の光が差し込む。",
)


class SideFields(EngineFields, kw_only=True):
    """``ring`` is the share of host blocks for a cache that no agent maps.

    ``device`` has cache and model.
    """

    tp: Annotated[int, Meta(ge=1, le=MAX_TP)] = 1
    pp: Annotated[int, Meta(ge=1, le=NUM_LAYERS)] = 1
    block: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 16
    ring: Annotated[float, Meta(gt=0, le=1)] | None = None
    device: str = CPU

    def __post_init__(self) -> None:
        gpu_number(self.device)

    def __str__(self) -> str:
        fields = to_builtins(self)
        return " ".join(
            f"{key}={value}" for key, value in fields.items() if value not in (None, False, CPU)
        )


def encode(text: str) -> list[int]:
    return list(text.encode())


RUN, ENGINES, MODEL = "Run", "Engines", "Model"


def _number(panel: str, low: int, high: int, text: str) -> Any:
    return typer.Option(min=low, max=high, metavar="N", help=text, rich_help_panel=panel)


def _option(panel: str, text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel)


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Raises `ConfigError`."""

    requests: Annotated[int, _number(RUN, 1, 100_000, "How many to serve.")] = 12
    concurrency: Annotated[int, _number(RUN, 1, 256, "How many at a time.")] = 4
    max_new_tokens: Annotated[
        int, _number(RUN, 1, MAX_TOKENS - 1, "Tokens to generate for each request.")
    ] = 24
    prompt_file: Annotated[
        FilePath | None,
        _option(RUN, "Prompts, one a line, instead of the built-in ones.", metavar="FILE"),
    ] = None
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
        Path | None, _option(ENGINES, "Path of every read; by default the agent chooses.")
    ] = None

    kv_heads: Annotated[
        int, _number(MODEL, 0, MAX_KV_HEADS, "KV heads of each layer; 0: MLA, a latent for all.")
    ] = 4
    window: Annotated[
        int | None,
        _number(MODEL, 2, MAX_TOKENS, "Every other layer attends to the last N tokens only."),
    ] = None
    flip_one_byte: Annotated[bool, typer.Option("--flip-one-byte", hidden=True)] = False

    def __post_init__(self) -> None:
        if self.max_prompt_tokens + self.max_new_tokens > MAX_TOKENS:
            raise ConfigError(
                f"a prompt of {self.max_prompt_tokens} tokens and {self.max_new_tokens} new ones"
                f" are more than the {MAX_TOKENS} tokens that the model can take"
            )
        for role, fields in self.sides.items():
            if fields.ring is not None and fields.ring * self.concurrency < 1:
                raise ConfigError(
                    f"--{role}: a ring of {fields.ring:g} of a cache for {self.concurrency} "
                    "requests does not hold the longest of them: raise ring or --concurrency"
                )

    @cached_property
    def sides(self) -> dict[str, SideFields]:
        fields = {"prefill": self.prefill, "decode": self.decode}
        return {role: read_fields(f"--{role}", text, SideFields) for role, text in fields.items()}

    @cached_property
    def prompts(self) -> tuple[str, ...]:
        path = self.prompt_file
        if path is None:
            return BUILT_IN
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or reason_of(error)
            raise ConfigError(f"cannot read {path}: {reason}") from error
        prompts = tuple(line for line in lines if line.strip())
        if not prompts:
            raise ConfigError(f"{path} has no prompts: write one a line")
        return prompts

    @property
    def max_prompt_tokens(self) -> int:
        return max(len(encode(prompt)) for prompt in self.prompts)

    def spec(self, engine_id: str, fields: EngineFields | None = None) -> EngineSpec:
        fields = fields or EngineFields()
        whole = ModelFields(
            layers=NUM_LAYERS,
            head=HEAD_DIM,
            kv_heads=self.kv_heads,
            attention="gqa" if self.kv_heads else "mla",
            window=self.window,
            model="kvbus-demo",
            tp=fields.tp,
            pp=fields.pp,
            block=fields.block,
        )
        return whole.engine(engine_id)


class Step(Struct, frozen=True):
    """``digest`` is the blake2b of the token's float32 logits."""

    token: int
    digest: str


class EngineSetup(Struct, frozen=True, kw_only=True):
    """Prefill computes ``prefill_chunk`` tokens (None: all) before it offers them."""

    attach_path: str
    spec: EngineSpec
    layout: KvLayout
    device: str
    num_blocks: dict[str, int]
    ring_blocks: dict[str, int] | None
    prefill_chunk: int | None
    flip_one_byte: bool
