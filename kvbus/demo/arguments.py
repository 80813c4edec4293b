"""The options of ``kvbus demo``: types, bounds and help texts, and the run that they describe.

What depends on several of them is checked by `DemoOptions`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbus.demo.model_config import MAX_TOKENS, MAX_TP, NUM_LAYERS, Attention, ModelConfig
from kvbus.demo.options import DemoOptions, EngineShape, Layout, Memory, ReadPath
from kvbus.demo.prompts import read_prompts
from kvbus.errors import ConfigError

MAX_KV_HEADS = 32

BOTH, PREFILL, DECODE = "Both engines", "Prefill engine", "Decode engine"
MODEL, RUN = "Model", "Run"


def _number(panel: str, low: int, high: int, text: str) -> Any:
    return typer.Option(min=low, max=high, metavar="N", help=text, rich_help_panel=panel)


def _choice(panel: str, text: str, *names: str) -> Any:
    return typer.Option(*names, case_sensitive=False, help=text, rich_help_panel=panel)


def _run(text: str, metavar: str | None = None, *names: str) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=RUN)


TP_HELP = "Ranks that share the KV heads."
PP_HELP = f"Pipeline stages that share the {NUM_LAYERS} layers."
BLOCK_SIZE_HELP, LAYOUT_HELP = "Instead of --block-size.", "Instead of --layout."
CROSS_LAYER_HELP = "One region of all layers."
MEMORY_HELP = "Shared with the agent, or the engine's own, copied through a ring of host blocks."

BlockSize = Annotated[int, _number(BOTH, 1, MAX_TOKENS, "Tokens in a block of the KV caches.")]
BlockLayout = Annotated[Layout, _choice(BOTH, "Order of the axes within a block.")]
CrossLayer = Annotated[bool, _choice(BOTH, CROSS_LAYER_HELP, "--cross-layer/--per-layer")]
RingShare = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Size of a ring of host blocks, as a part of the engine's cache; half, or a request.",
        rich_help_panel=BOTH,
    ),
]

PrefillTp = Annotated[int, _number(PREFILL, 1, MAX_TP, TP_HELP)]
PrefillPp = Annotated[int, _number(PREFILL, 1, NUM_LAYERS, PP_HELP)]
PrefillBlockSize = Annotated[int | None, _number(PREFILL, 1, MAX_TOKENS, BLOCK_SIZE_HELP)]
PrefillLayout = Annotated[Layout | None, _choice(PREFILL, LAYOUT_HELP)]
PrefillCrossLayer = Annotated[bool, _choice(PREFILL, CROSS_LAYER_HELP, "--prefill-cross-layer")]
PrefillMemory = Annotated[Memory, _choice(PREFILL, MEMORY_HELP)]
CHUNK_HELP = "Compute N tokens at a time; what is done is read meanwhile."
PrefillChunk = Annotated[int | None, _number(PREFILL, 1, MAX_TOKENS, CHUNK_HELP)]

DecodeTp = Annotated[int, _number(DECODE, 1, MAX_TP, TP_HELP)]
DecodePp = Annotated[int, _number(DECODE, 1, NUM_LAYERS, PP_HELP)]
DecodeBlockSize = Annotated[int | None, _number(DECODE, 1, MAX_TOKENS, BLOCK_SIZE_HELP)]
DecodeLayout = Annotated[Layout | None, _choice(DECODE, LAYOUT_HELP)]
DecodeCrossLayer = Annotated[bool, _choice(DECODE, CROSS_LAYER_HELP, "--decode-cross-layer")]
DecodeMemory = Annotated[Memory, _choice(DECODE, MEMORY_HELP)]
PATH_HELP = "How the agent reads; auto: by its cost model."
Path_ = Annotated[ReadPath, _choice(DECODE, PATH_HELP, "--path")]

KV_HEADS_HELP = "KV heads of each layer, 4 unless told otherwise."
KvHeads = Annotated[int | None, _number(MODEL, 1, MAX_KV_HEADS, KV_HEADS_HELP)]
ATTENTION_HELP = "Cache K and V of some heads, or one latent that all ranks have."
AttentionKind = Annotated[Attention, _choice(MODEL, ATTENTION_HELP)]
WINDOW_HELP = "Every other layer attends to the last N tokens only."
Window = Annotated[int | None, _number(MODEL, 2, MAX_TOKENS, WINDOW_HELP)]
Seed = Annotated[int, _number(MODEL, 0, 2**32, "Seed of the weights.")]

Requests = Annotated[int, _number(RUN, 1, 100_000, "How many to serve.")]
Concurrency = Annotated[int, _number(RUN, 1, 256, "How many at a time.")]
NEW_TOKENS_HELP = "Tokens to generate for each request."
MaxNewTokens = Annotated[int, _number(RUN, 1, MAX_TOKENS - 1, NEW_TOKENS_HELP)]
PROMPTS_HELP = "Prompts, one a line, instead of the built-in ones."
PromptFile = Annotated[Path | None, _run(PROMPTS_HELP, "FILE")]
KeepLogs = Annotated[Path | None, _run("Keep the logs of the four processes there.", "DIR")]
JSON_HELP = "Print one JSON object, as the last line of stdout."
AsOneJson = Annotated[bool, _run(JSON_HELP, None, "--json")]
FlipOneByte = Annotated[bool, typer.Option("--flip-one-byte", hidden=True)]


def demo_options(given: Mapping[str, Any]) -> DemoOptions:
    """The run that these options describe, by their names; raises `ConfigError`."""
    if given["attention"] is Attention.MLA and given["kv_heads"] is not None:
        raise ConfigError("--kv-heads is for --attention gqa: with mla, all heads share one latent")
    return DemoOptions(
        prompts=read_prompts(given["prompt_file"]),
        num_requests=given["requests"],
        model=ModelConfig(
            kv_heads=given["kv_heads"] or ModelConfig.kv_heads,
            **{name: given[name] for name in ("seed", "attention", "window")},
        ),
        prefill=_engine_shape(given, "prefill"),
        decode=_engine_shape(given, "decode"),
        ring_share=given["ring_share"] or max(0.5, 1 / given["concurrency"]),
        keep_logs=_made(given["keep_logs"]),
        **{
            name: given[name]
            for name in ("concurrency", "path", "prefill_chunk", "max_new_tokens", "flip_one_byte")
        },
    )


def _engine_shape(given: Mapping[str, Any], role: str) -> EngineShape:
    """An engine's own options, or else those of both."""
    either = ("layout", "block_size", "cross_layer")
    return EngineShape(
        **{name: given[f"{role}_{name}"] for name in ("tp", "pp", "memory")},
        **{name: given[f"{role}_{name}"] or given[name] for name in either},
    )


def _made(folder: Path | None) -> Path | None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder
