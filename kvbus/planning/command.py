"""The ``kvbus plan`` command: reads, path and duration of a handoff between two specs.

It starts no agent and allocates no KV memory; addresses are synthetic.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Column, Table
from rich.text import Text
from typer import Option

from kvbus.console import Console
from kvbus.errors import ConfigError, ErrorCode, KVBusError
from kvbus.geometry import (
    MAX_BLOCKS,
    AxisName,
    BlockTable,
    EngineSpec,
    GroupSpec,
    KvLayout,
    lay_out_rank,
    num_blocks_for,
)
from kvbus.options import with_options
from kvbus.output import fail, write_json
from kvbus.planning import (
    Learned,
    Path,
    PlacedRank,
    ReadMap,
    RunPlan,
    Share,
    Span,
    SpanMap,
    Spans,
    StagedPlan,
    bytes_by_group,
    check_compatible,
    choose_path,
    cut_into_tiles,
    least_tile_bytes,
    position_bytes,
    span_bytes,
    staged_plans,
    usual_tile_bytes,
)
from kvbus.planning.choose import LONG_RUN_BYTES
from kvbus.spec_text import MAX_SPAN, read_engine
from kvbus.text import bytes_text, numbers_text, time_text

MAX_PAIRED_LAYERS = 1 << 19
MAX_RANK_BYTES, RANK_DISTANCE_BYTES = 1 << 48, 1 << 50
MAX_MERGED = 1 << 22
"""Above this number, runs are counted before neighbours are merged."""
MAX_ROWS = 40
PREFILL_STEP, DECODE_STEP = 0.618, 0.414
"""Distance of a request's next block, as a fraction of the cache, as in a busy one."""
HOW = {
    Path.DIRECT: "straight from blocks to blocks",
    Path.STAGED: "whole blocks, into slots of the decode agent, and copied from there",
    Path.PACKED: "one a tile, gathered before and scattered after it",
    Path.MAPPED: "copied from blocks to blocks by the decode agent, without a READ",
}
CHOSEN = "green"
SHORT = {"num_bytes": "bytes", "num_tiles": "tiles", "prefill": "from", "decode": "to"}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Two engines, tokens [first_token, tokens) of a request, and inputs of the path choice."""

    prefill: Annotated[str, Option("--from", metavar="SPEC", help="The prefill engine.")]
    decode: Annotated[str, Option("--to", metavar="SPEC", help="The decode engine.")]
    tokens: Annotated[int, Option(min=0, max=MAX_SPAN, metavar="N", help="Tokens of the request.")]
    first_token: Annotated[
        int,
        Option(
            min=0, max=MAX_SPAN, metavar="M", help="First token to move: those before it are there."
        ),
    ] = 0
    same_machine: Annotated[
        bool,
        Option("--same-machine", help="Agents of one machine and user: memory can be mapped."),
    ] = False
    slot_bytes: Annotated[
        int,
        Option(min=4096, max=1 << 30, metavar="BYTES", help="Size of the agents' staging slots."),
    ] = 8 << 20
    as_one_json: Annotated[
        bool, Option("--json", help="Print one JSON object, as the last line of stdout.")
    ] = False


@with_options(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Show what a handoff would read from whom, on which path, and how long it would take.

    A SPEC is a text such as `tp=4,layout=HND,block=16,kv_heads=8,head=128,layers=32,dtype=bf16`,
    with commas or spaces. It needs `layers`, `head` and, unless `attention=mla`, `kv_heads`.

    * `tp`, `pp`: tensor parallel ranks and pipeline stages (1); with fewer `kv_heads`, replicas
    * `layout`: `NHD`, `HND`, or all axes as `block.kv.token.head.dim` (NHD); `cross_layer=true`
      puts all layers into one region
    * `block`: tokens in a block (16)
    * `kv_heads`, `head`, `layers`, `dtype`: of the model (`dtype=bf16`)
    * `attention`: `gqa`, or `mla` with one latent of `head` elements (gqa)
    * `window`: tokens of a sliding window, which every other layer has (none)
    * `model`: must be equal on both sides (unnamed)

    A SPEC can also be a TOML or JSON file with an EngineSpec of the protocol, optionally followed
    by its layout: `engine.toml,layout=HND,cross_layer=true`.

    The time follows from the rates that agents assume before their first read.

    Exit status 1: the engines cannot exchange KV; 2: a mistake in a spec or an option.
    """
    try:
        found = make_plan(options)
    except KVBusError as error:
        status = 1 if error.code is ErrorCode.INCOMPATIBLE else 2
        fail(error.message, status=status, cause=error)
    _print(found, Console())
    if options.as_one_json:
        write_json(found)


class PlannedEngine(msgspec.Struct, frozen=True):
    """One engine; ``axes`` of its memory, outermost first."""

    engine: EngineSpec
    axes: tuple[AxisName, ...]


class PlannedRead(msgspec.Struct, frozen=True, kw_only=True, rename=SHORT):
    """One rank's reads from another; intervals are half open."""

    prefill_rank: int
    decode_rank: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    heads: tuple[int, int]
    positions: tuple[int, int]
    num_bytes: int


class PathPlan(msgspec.Struct, frozen=True, kw_only=True, rename=SHORT):
    """One path: ``descriptors`` READs, or copies if mapped, of ``num_bytes`` in total.

    ``scattered_bytes`` are written out of slots: more than are read if ranks hold the same KV.
    """

    descriptors: int
    num_bytes: int
    num_tiles: int = 0
    scattered_bytes: int = 0


class Plan(msgspec.Struct, frozen=True, kw_only=True, rename=SHORT):
    """The result of `make_plan`, as ``--json`` prints it; impossible paths are null."""

    prefill: PlannedEngine
    decode: PlannedEngine
    tokens: tuple[int, int]
    num_bytes: int
    reads: tuple[PlannedRead, ...]
    unread_ranks: tuple[int, ...]
    paths: dict[Path, PathPlan | None]
    choice: Path
    reason: str
    seconds: float
    slot_bytes: int


def make_plan(options: PlanOptions) -> Plan:
    """Plan a handoff; raises `GeometryError` (``incompatible``) and `ConfigError`."""
    first, stop = options.first_token, options.tokens
    if first > stop:
        raise ConfigError(f"--first-token: {first} is more than --tokens {stop}")
    specs = options.prefill, options.decode
    prefill, decode = (
        PlannedEngine(engine, layout.axes)
        for engine, layout in map(read_engine, ("--from", "--to"), specs)
    )
    check_compatible(prefill.engine, decode.engine)
    num_layers = sum(len(group.layers) for group in decode.engine.groups)
    num_pairs = prefill.engine.tp_size * decode.engine.tp_size * num_layers
    if num_pairs > MAX_PAIRED_LAYERS:
        raise ConfigError(
            f"--from, --to: these are {num_pairs} pairs of rank, rank and layer: at most "
            f"{MAX_PAIRED_LAYERS} can be planned"
        )
    spans = SpanMap(decode.engine.groups, prefill.engine.groups).whole(first, stop)
    holder = _Placed(prefill, spans, step=PREFILL_STEP)
    reader = _Placed(decode, spans, step=DECODE_STEP)
    read_map = ReadMap(*([one.rank for one in side.ranks.values()] for side in (holder, reader)))
    shares, joined = read_map.shares(), read_map.joined()
    reads = tuple(_reads(decode.engine, shares, spans))
    num_bytes = sum(one.num_bytes for one in reads)
    joined_bytes = span_bytes(bytes_by_group(joined, decode.engine), spans)
    repeated_bytes, group = num_bytes - joined_bytes, decode.engine.group
    runs = RunPlan(holder.ranks, reader.ranks, shares)
    num_runs = runs.num_runs(spans)
    merged = num_runs
    if num_runs <= MAX_MERGED:
        merged = len(runs.runs(holder.tables, reader.tables, spans).reads().local)
    whole = PathPlan(descriptors=merged, num_bytes=num_bytes)
    paths: dict[Path, PathPlan | None] = dict.fromkeys(Path)
    paths[Path.DIRECT] = whole
    staged = staged_plans(holder.ranks, reader.ranks, joined, slot_bytes=options.slot_bytes)
    num_staged_runs = sum(one.num_runs(spans) for one in staged)
    if num_bytes and staged:
        tiles = _staged_tiles(staged, spans, num_bytes=num_bytes, slot_bytes=options.slot_bytes)
        merged = num_staged_runs
        if num_staged_runs <= MAX_MERGED:
            found = (one.reads(holder.tables, tile, slot_at=0).reads() for one, tile in tiles)
            merged = sum(len(each.local) for each in found)
        paths[Path.STAGED] = PathPlan(
            descriptors=merged,
            num_bytes=joined_bytes,
            num_tiles=len(tiles),
            scattered_bytes=num_bytes,
        )
    least = least_tile_bytes(joined, decode.engine)
    if num_bytes and least <= options.slot_bytes:
        tile_bytes = usual_tile_bytes(num_bytes, least=least, slot_bytes=options.slot_bytes)
        num_tiles = sum(
            len(cut_into_tiles(one, group(one.group), spans[one.group], tile_bytes=tile_bytes))
            for one in joined
        )
        paths[Path.PACKED] = PathPlan(
            descriptors=num_tiles,
            num_bytes=joined_bytes,
            num_tiles=num_tiles,
            scattered_bytes=num_bytes,
        )
    if options.same_machine:
        paths[Path.MAPPED] = whole
    possible = [path for path, one in paths.items() if one]
    chosen = choose_path(
        possible,
        num_bytes=num_bytes,
        num_runs=num_runs,
        repeated_bytes=repeated_bytes,
        num_staged_runs=num_staged_runs,
    )
    reason = _reason(chosen, num_runs=num_runs, num_bytes=num_bytes, repeated_bytes=repeated_bytes)
    holders = {one.prefill_rank for one in reads}
    return Plan(
        prefill=prefill,
        decode=decode,
        tokens=(first, stop),
        num_bytes=num_bytes,
        reads=reads,
        unread_ranks=tuple(n for n in range(prefill.engine.num_ranks) if n not in holders),
        paths=paths,
        choice=chosen,
        reason=reason,
        seconds=Learned().predict_s(read.num_bytes if (read := paths[chosen]) else 0),
        slot_bytes=options.slot_bytes,
    )


def _staged_tiles(
    plans: tuple[StagedPlan, ...], spans: Spans, *, num_bytes: int, slot_bytes: int
) -> list[tuple[StagedPlan, Span]]:
    tile_bytes = usual_tile_bytes(num_bytes, least=1, slot_bytes=slot_bytes)
    return [
        (one, tile) for one in plans for tile in one.tiles(spans[one.group], tile_bytes=tile_bytes)
    ]


class _Placed:
    """The ranks of an engine at synthetic addresses, and the block tables of a request.

    ``step`` is the distance of the next block, as a fraction of the cache.
    """

    def __init__(self, planned: PlannedEngine, spans: Spans, *, step: float) -> None:
        engine, layout = planned.engine, KvLayout(planned.axes)
        self.tables, num_blocks = dict[str, BlockTable](), dict[str, int]()
        for group in engine.groups:
            start, stop = spans.get(group.name, (0, 0))  # an optional group may be missing
            first = start // group.block_size
            needed = num_blocks_for(stop, group.block_size) - first if stop > start else 0
            if needed > MAX_BLOCKS:
                raise ConfigError(
                    f"--tokens: {stop} tokens are {needed} blocks of group '{group.name}', at most "
                    f"{MAX_BLOCKS} are allowed"
                )
            # Ids are distinct: the cache is a power of 2, and the distance is odd.
            cache = num_blocks[group.name] = max(16, 1 << (2 * needed - 1).bit_length())
            ids = np.arange(needed, dtype=np.int64) * (int(cache * step) | 1) % cache
            self.tables[group.name] = BlockTable.of(ids, first_block=first)
        self.ranks: dict[int, PlacedRank] = {}
        for number in range(engine.num_ranks):
            rank = lay_out_rank(engine, number, layout, num_blocks=num_blocks)
            (segment,) = rank.segments
            if segment.size_bytes > MAX_RANK_BYTES:
                raise ConfigError(
                    f"--from, --to: a rank would have {segment.size_bytes} bytes of KV"
                )
            at = {segment.segment_id: (number + 1) * RANK_DISTANCE_BYTES}
            moved = tuple(region for region in rank.regions if region.group in spans)
            rank = msgspec.structs.replace(rank, regions=moved)
            self.ranks[number] = PlacedRank(engine, rank, at)


def _reads(decode: EngineSpec, shares: tuple[Share, ...], spans: Spans) -> Iterator[PlannedRead]:
    for share in sorted(shares, key=lambda one: (one.reader, one.group, one.holder, one.layers)):
        start, stop = spans[share.group]
        if stop > start:
            yield PlannedRead(
                prefill_rank=share.holder,
                decode_rank=share.reader,
                group=share.group,
                layers=share.layers,
                parts=share.parts,
                heads=(share.first_head, share.first_head + share.num_heads),
                positions=(start, stop),
                num_bytes=(stop - start) * position_bytes(share, decode.group(share.group)),
            )


def _reason(chosen: Path, *, num_runs: int, num_bytes: int, repeated_bytes: int) -> str:
    long = bytes_text(LONG_RUN_BYTES)
    if not num_bytes:
        return "there is nothing to read"
    if chosen is Path.MAPPED:
        return "memory that is mapped is copied once"
    if chosen is Path.DIRECT:
        is_long = num_bytes >= num_runs * LONG_RUN_BYTES and not repeated_bytes
        return f"runs have {long} or more" if is_long else "it is so little"
    if repeated_bytes:
        return "several decode ranks read the same"
    but = ", blocks have longer ones" if chosen is Path.STAGED else ""
    return f"runs are under {long}{but}"


def _print(plan: Plan, console: Console) -> None:
    for name, side in (("from", plan.prefill), ("to  ", plan.decode)):
        groups = "; ".join(map(_group_line, side.engine.groups))
        tp, pp, axes = side.engine.tp_size, side.engine.pp_size, ".".join(side.axes)
        console.print(Text(f"{name}  tp={tp} pp={pp} {axes}; {groups}"))
    reads = _table("Reads", "prefill rank", "decode rank", "group", "layers", "heads", "positions")
    reads.add_column("bytes", justify="right", no_wrap=True)
    for read in plan.reads[:MAX_ROWS]:
        reads.add_row(
            *(str(read.prefill_rank), str(read.decode_rank), Text(read.group)),
            *(numbers_text(read.layers), numbers_text(range(*read.heads))),
            *(f"{read.positions[0]} to {read.positions[1]}", bytes_text(read.num_bytes)),
        )
    console.print("", reads)
    if len(plan.reads) > MAX_ROWS:
        console.print(f"and {len(plan.reads) - MAX_ROWS} more: --json has them all")
    console.print(f"{bytes_text(plan.num_bytes)} in all")
    if plan.reads and plan.unread_ranks:
        console.print(f"nothing is read from prefill ranks {numbers_text(plan.unread_ranks)}")
    paths = _table("Paths", "path", "READs or copies", "mean", "bytes", "tiles")
    for path, one in plan.paths.items():
        cells = ["cannot"]
        if one:
            mean, tiles = one.num_bytes / max(1, one.descriptors), f"{one.num_tiles:,}"
            cells = [f"{one.descriptors:,}", bytes_text(mean), bytes_text(one.num_bytes), tiles]
        paths.add_row(path, *cells, style=CHOSEN if path is plan.choice else "")
    console.print("", paths)
    packed = plan.paths[Path.PACKED]
    if packed and packed.scattered_bytes > packed.num_bytes:
        once, often = bytes_text(packed.num_bytes), bytes_text(packed.scattered_bytes)
        console.print(f"packed reads what several decode ranks hold alike once: {once} for {often}")
    console.print(f"{plan.choice}: {plan.reason}; {HOW[plan.choice]}", style=CHOSEN)
    console.print(f"about {time_text(plan.seconds)}, as agents assume that have not read yet")
    console.print(Text(f"slots of {bytes_text(plan.slot_bytes)}"))


def _group_line(group: GroupSpec) -> str:
    window = f", window {group.window}" if group.window else ""
    heads = f"{group.num_kv_heads} heads of {group.head_dim} {group.dtype}"
    return (
        f"{group.name}: {len(group.layers)} layers, {heads}, blocks of {group.block_size}{window}"
    )


def _table(title: str, *headings: str) -> Table:
    columns = (Column(one, justify="left" if one == "path" else "right") for one in headings)
    return Table(
        *columns,
        title=title,
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
