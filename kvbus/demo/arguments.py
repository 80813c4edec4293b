"""The options of ``kvbus demo``: their types, bounds and help texts.

Refuses values out of range; what depends on several of them is for `demo_options`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kvbus.demo.options import MAX_TOKENS, DemoOptions
from kvbus.demo.prompts import read_prompts
from kvbus.demo.shape import (
    MAX_TP,
    NUM_LAYERS,
    Attention,
    Layout,
    Memory,
    ModelShape,
    ReadPath,
    Side,
)
from kvbus.errors import ConfigError

MAX_KV_HEADS = 32

BOTH, PREFILL, DECODE = "Both engines", "Prefill engine", "Decode engine"
MODEL, RUN = "Model", "Run"


def _number(panel: str, low: int, high: int, text: str) -> Any:
    return typer.Option(min=low, max=high, metavar="N", help=text, rich_help_panel=panel)


def _tp(panel: str) -> Any:
    return _number(panel, 1, MAX_TP, "Ranks that share the KV heads.")


def _pp(panel: str) -> Any:
    return _number(panel, 1, NUM_LAYERS, f"Pipeline stages that share the {NUM_LAYERS} layers.")


def _block_size(panel: str, text: str = "Instead of --block-size.") -> Any:
    return _number(panel, 1, MAX_TOKENS, text)


def _layout(panel: str, text: str = "Instead of --layout.") -> Any:
    return typer.Option(case_sensitive=False, help=text, rich_help_panel=panel)


def _cross_layer(panel: str, *names: str) -> Any:
    return typer.Option(*names, help="One region of all layers.", rich_help_panel=panel)


def _memory(panel: str) -> Any:
    text = "Shared with the agent, or the engine's own, copied through a ring of host blocks."
    return typer.Option(case_sensitive=False, help=text, rich_help_panel=panel)


def _run(text: str, metavar: str) -> Any:
    return typer.Option(metavar=metavar, help=text, rich_help_panel=RUN)


BlockSize = Annotated[int, _block_size(BOTH, "Tokens in a block of the KV caches.")]
BlockLayout = Annotated[Layout, _layout(BOTH, "Order of the axes within a block.")]
CrossLayer = Annotated[bool, _cross_layer(BOTH, "--cross-layer/--per-layer")]

RingShare = Annotated[
    float | None,
    typer.Option(
        min=0.01,
        max=1.0,
        help="Size of a ring of host blocks, as a part of the engine's cache; half, or a request.",
        rich_help_panel=BOTH,
    ),
]

PrefillTp = Annotated[int, _tp(PREFILL)]
PrefillPp = Annotated[int, _pp(PREFILL)]
PrefillBlockSize = Annotated[int | None, _block_size(PREFILL)]
PrefillLayout = Annotated[Layout | None, _layout(PREFILL)]
PrefillCrossLayer = Annotated[bool, _cross_layer(PREFILL, "--prefill-cross-layer")]
PrefillMemory = Annotated[Memory, _memory(PREFILL)]
PrefillChunk = Annotated[
    int | None,
    _number(PREFILL, 1, MAX_TOKENS, "Compute N tokens at a time; what is done is read meanwhile."),
]

DecodeTp = Annotated[int, _tp(DECODE)]
DecodePp = Annotated[int, _pp(DECODE)]
DecodeBlockSize = Annotated[int | None, _block_size(DECODE)]
DecodeLayout = Annotated[Layout | None, _layout(DECODE)]
DecodeCrossLayer = Annotated[bool, _cross_layer(DECODE, "--decode-cross-layer")]
DecodeMemory = Annotated[Memory, _memory(DECODE)]
Path_ = Annotated[
    ReadPath,
    typer.Option(
        "--path",
        case_sensitive=False,
        help="How the agent reads; auto: by its cost model.",
        rich_help_panel=DECODE,
    ),
]

KvHeads = Annotated[
    int | None, _number(MODEL, 1, MAX_KV_HEADS, "KV heads of each layer, 4 unless told otherwise.")
]
AttentionKind = Annotated[
    Attention,
    typer.Option(
        case_sensitive=False,
        help="Cache K and V of some heads, or one latent that all ranks have.",
        rich_help_panel=MODEL,
    ),
]
Window = Annotated[
    int | None,
    _number(MODEL, 2, MAX_TOKENS, "Every other layer attends to the last N tokens only."),
]
Seed = Annotated[int, _number(MODEL, 0, 2**32, "Seed of the weights.")]

Requests = Annotated[int, _number(RUN, 1, 100_000, "How many to serve.")]
Concurrency = Annotated[int, _number(RUN, 1, 256, "How many at a time.")]
MaxNewTokens = Annotated[
    int, _number(RUN, 1, MAX_TOKENS - 1, "Tokens to generate for each request.")
]
PromptFile = Annotated[
    Path | None, _run("Prompts, one a line, instead of the built-in ones.", "FILE")
]
KeepLogs = Annotated[Path | None, _run("Keep the logs of the four processes there.", "DIR")]
AsOneJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object, as the last line of stdout.", rich_help_panel=RUN
    ),
]
FlipOneByte = Annotated[bool, typer.Option("--flip-one-byte", hidden=True)]


def demo_options(given: Mapping[str, Any]) -> DemoOptions:
    """The run that these options describe, by their names; raises `ConfigError`."""
    return DemoOptions(
        prompts=read_prompts(given["prompt_file"]),
        num_requests=given["requests"],
        concurrency=given["concurrency"],
        model=_model_shape(given),
        prefill=_side(given, "prefill"),
        decode=_side(given, "decode"),
        path=given["path"],
        prefill_chunk=given["prefill_chunk"],
        ring_share=given["ring_share"] or max(0.5, 1 / given["concurrency"]),
        max_new_tokens=given["max_new_tokens"],
        keep_logs=_made(given["keep_logs"]),
        flip_one_byte=given["flip_one_byte"],
    )


def _side(given: Mapping[str, Any], role: str) -> Side:
    """An engine's own options, or else those of both."""

    def option(name: str) -> Any:
        return given[f"{role}_{name}"] or given[name]

    return Side(
        tp=given[f"{role}_tp"],
        pp=given[f"{role}_pp"],
        layout=option("layout"),
        block_size=option("block_size"),
        cross_layer=option("cross_layer"),
        memory=given[f"{role}_memory"],
    )


def _model_shape(given: Mapping[str, Any]) -> ModelShape:
    attention, kv_heads = given["attention"], given["kv_heads"]
    if attention is Attention.MLA and kv_heads is not None:
        raise ConfigError("--kv-heads is for --attention gqa: with mla, all heads share one latent")
    return ModelShape(
        seed=given["seed"],
        attention=attention,
        kv_heads=kv_heads or ModelShape.kv_heads,
        window=given["window"],
    )


def _made(folder: Path | None) -> Path | None:
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {folder}: {error.strerror}") from error
    return folder
