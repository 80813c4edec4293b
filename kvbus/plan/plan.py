"""A plan: what one handoff would read from whom, and by which path.

Refuses, with the errors of `kvbus.planning`, two engines whose KV is not the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Option

from kvbus.errors import ConfigError
from kvbus.geometry import DTYPE_SIZES_BYTES
from kvbus.plan.keys import MAX_SPAN
from kvbus.plan.paths import PathPlan, PlannedHandoff, plan_paths
from kvbus.plan.spec import PlannedEngine, read_engine
from kvbus.plan.synthetic_engine import synthesize
from kvbus.planning import ReadMap, Share, Spans, check_compatible, fetch_shape, whole_spans

MAX_PAIRED_LAYERS = 1 << 19
DEFAULT_SLOT_BYTES = 8 << 20
PREFILL_STEP, DECODE_STEP = 0.618, 0.414


class PathOption(StrEnum):
    """A path, or the rule's choice."""

    AUTO = "auto"
    DIRECT = "direct"
    PACKED = "packed"
    REORDERED = "reordered"
    MAPPED = "mapped"


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Two engines, tokens [first_token, tokens) of a request, and what the path depends on."""

    prefill: Annotated[
        str, Option("--from", metavar="SPEC", help="The prefill engine: a text or a TOML file.")
    ]
    decode: Annotated[
        str, Option("--to", metavar="SPEC", help="The decode engine: a text or a TOML file.")
    ]
    tokens: Annotated[int, Option(min=0, max=MAX_SPAN, metavar="N", help="Tokens of the request.")]
    first_token: Annotated[
        int,
        Option(
            min=0, max=MAX_SPAN, metavar="M", help="First token to move: those before it are there."
        ),
    ] = 0
    path: Annotated[PathOption, Option(help="The path, or auto: by the rule.")] = PathOption.AUTO
    contiguous: Annotated[
        bool, Option("--contiguous", help="Blocks in order, as in an empty cache; else scattered.")
    ] = False
    same_machine: Annotated[
        bool,
        Option("--same-machine", help="Agents of one machine and user: memory can be mapped."),
    ] = False
    slot_bytes: Annotated[
        int,
        Option(min=4096, max=1 << 30, metavar="BYTES", help="Size of the agents' staging slots."),
    ] = DEFAULT_SLOT_BYTES
    as_one_json: Annotated[
        bool, Option("--json", help="Print one JSON object, as the last line of stdout.")
    ] = False
    svg: Annotated[
        Path | None, Option(metavar="FILE", help="Write a picture of the reads there.")
    ] = None


class PlannedRead(msgspec.Struct, frozen=True, kw_only=True, rename={"num_bytes": "bytes"}):
    """What one rank reads from another, as ``--json`` has it; intervals are half open."""

    prefill_rank: int
    decode_rank: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    heads: tuple[int, int]
    positions: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What `make_plan` found; ``paths`` are those that the handoff can take.

    Several decode ranks read ``repeated_bytes`` that another one has read before.
    """

    prefill: PlannedEngine
    decode: PlannedEngine
    options: PlanOptions
    reads: tuple[PlannedRead, ...]
    paths: dict[fetch_shape.Path, PathPlan]
    chosen: fetch_shape.Path
    repeated_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that the decode engine needs."""
        return sum(read.num_bytes for read in self.reads)

    @property
    def unread_ranks(self) -> tuple[int, ...]:
        """Prefill ranks that nothing is read from."""
        holders = {read.prefill_rank for read in self.reads}
        return tuple(rank for rank in range(self.prefill.engine.num_ranks) if rank not in holders)


def make_plan(options: PlanOptions) -> Plan:
    """The plan that they ask for.

    Raises `GeometryError` (``incompatible``) when the engines differ in more than shape, and
    `ConfigError` when an option is wrong, the plan would be too large or the path is not possible.
    """
    first, stop = options.first_token, options.tokens
    if first > stop:
        raise ConfigError(f"--first-token: {first} is more than --tokens {stop}")
    prefill, decode = read_engine("--from", options.prefill), read_engine("--to", options.decode)
    check_compatible(prefill.engine, decode.engine)
    _refuse_large(prefill, decode)
    spans = whole_spans(decode.engine.groups, prefill.engine.groups, first, stop)
    holder = synthesize(prefill, spans, step=None if options.contiguous else PREFILL_STEP)
    reader = synthesize(decode, spans, step=None if options.contiguous else DECODE_STEP)
    specs = ([one.rank for one in engine.ranks.values()] for engine in (holder, reader))
    read_map = ReadMap(*specs)
    shares = read_map.shares()
    handoff = PlannedHandoff(holder, reader, shares, read_map.joined(), spans)
    paths, by_rule, repeated_bytes = plan_paths(
        handoff, slot_bytes=options.slot_bytes, same_machine=options.same_machine
    )
    chosen = by_rule if options.path is PathOption.AUTO else fetch_shape.Path(options.path)
    if chosen not in paths:
        possible = ", ".join(paths)
        raise ConfigError(f"--path: this handoff cannot take {chosen}, it can take {possible}")
    reads = tuple(_reads(decode, shares, spans))
    return Plan(prefill, decode, options, reads, paths, chosen, repeated_bytes)


def _reads(decode: PlannedEngine, shares: tuple[Share, ...], spans: Spans) -> Iterator[PlannedRead]:
    for share in sorted(shares, key=lambda one: (one.reader, one.group, one.holder, one.layers)):
        start, stop = spans[share.group]
        group = decode.engine.group(share.group)
        head_bytes = group.part_shape(share.parts[0]).head_dim * DTYPE_SIZES_BYTES[group.dtype]
        num_heads = len(share.layers) * len(share.parts) * share.num_heads
        if stop > start:
            yield PlannedRead(
                prefill_rank=share.holder,
                decode_rank=share.reader,
                group=share.group,
                layers=share.layers,
                parts=share.parts,
                heads=(share.first_head, share.first_head + share.num_heads),
                positions=(start, stop),
                num_bytes=(stop - start) * num_heads * head_bytes,
            )


def _refuse_large(prefill: PlannedEngine, decode: PlannedEngine) -> None:
    num_layers = sum(len(group.layers) for group in decode.engine.groups)
    num_pairs = prefill.engine.tp_size * decode.engine.tp_size * num_layers
    if num_pairs > MAX_PAIRED_LAYERS:
        raise ConfigError(
            f"--from, --to: tp={prefill.engine.tp_size} and tp={decode.engine.tp_size} with"
            f" layers={num_layers} are {num_pairs} pairs of rank, rank and layer:"
            f" at most {MAX_PAIRED_LAYERS} can be planned"
        )
