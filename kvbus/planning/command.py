"""The command ``kvbus plan``."""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
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
    Runs,
    Span,
    SpanMap,
    Spans,
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
from kvbus.planning.choose import LONG_RUN_BYTES, has_long_runs, is_little
from kvbus.spec_text import MAX_SPAN, read_engine
from kvbus.text import bytes_text, numbers_text, time_text

MAX_PAIRED_LAYERS = 1 << 19
MAX_RANK_BYTES, RANK_DISTANCE_BYTES = 1 << 48, 1 << 50
MAX_MERGED = 1 << 22
"""Above this number, neighbouring runs are counted separately."""
MAX_ROWS = 40
PREFILL_STEP, DECODE_STEP = 0.618, 0.414
"""Distance to a request's next block, as a fraction of the cache."""
HOW = {
    Path.DIRECT: "READs straight from blocks to blocks",
    Path.STAGED: "READs of whole blocks into slots of the decode agent, copied from there",
    Path.PACKED: "one READ for each tile, gathered before it and scattered after it",
    Path.MAPPED: "copied from blocks to blocks by the decode agent, without a READ",
}
CHOSEN = "green"
SHORT = {"num_bytes": "bytes", "num_tiles": "tiles", "prefill": "from", "decode": "to"}


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
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

    The duration follows from the rates that agents assume before their first read.

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
    engine: EngineSpec
    axes: tuple[AxisName, ...]


class PlannedRead(msgspec.Struct, frozen=True, kw_only=True, rename=SHORT):
    prefill_rank: int
    decode_rank: int
    group: str
    layers: tuple[int, ...]
    parts: tuple[str, ...]
    heads: tuple[int, int]
    positions: tuple[int, int]
    num_bytes: int


class PathPlan(msgspec.Struct, frozen=True, kw_only=True, rename=SHORT):
    descriptors: int
    num_bytes: int
    num_tiles: int = 0
    scattered_bytes: int = 0


class HandoffPlan(msgspec.Struct, frozen=True, kw_only=True, rename=SHORT):
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


def make_plan(options: PlanOptions) -> HandoffPlan:
    """Raises `GeometryError` (``incompatible``) and `ConfigError`."""
    first, stop = options.first_token, options.tokens
    if first > stop:
        raise ConfigError(f"--first-token: {first} is more than --tokens {stop}")
    prefill, decode = _read_engines(options)
    spans = SpanMap(decode.engine.groups, prefill.engine.groups).whole(first, stop)
    handoff = _Handoff(prefill, decode, spans, slot_bytes=options.slot_bytes)
    direct = handoff.direct_path()
    paths: dict[Path, PathPlan | None] = {
        Path.DIRECT: direct,
        Path.STAGED: handoff.staged_path(),
        Path.PACKED: handoff.packed_path(),
        Path.MAPPED: direct if options.same_machine else None,  # it copies the same runs
    }
    possible = {path: one for path, one in paths.items() if one}
    choice = handoff.choose(possible)
    reads = tuple(handoff.reads())
    read_from = {one.prefill_rank for one in reads}
    return HandoffPlan(
        prefill=prefill,
        decode=decode,
        tokens=(first, stop),
        num_bytes=handoff.num_bytes,
        reads=reads,
        unread_ranks=tuple(n for n in range(prefill.engine.num_ranks) if n not in read_from),
        paths=paths,
        choice=choice,
        reason=handoff.reason(choice),
        seconds=Learned().predict_s(possible[choice].num_bytes),
        slot_bytes=options.slot_bytes,
    )


def _read_engines(options: PlanOptions) -> tuple[PlannedEngine, PlannedEngine]:
    prefill, decode = (
        PlannedEngine(engine, layout.axes)
        for engine, layout in (
            read_engine("--from", options.prefill),
            read_engine("--to", options.decode),
        )
    )
    check_compatible(prefill.engine, decode.engine)
    num_layers = sum(len(group.layers) for group in decode.engine.groups)
    num_pairs = prefill.engine.tp_size * decode.engine.tp_size * num_layers
    if num_pairs > MAX_PAIRED_LAYERS:
        raise ConfigError(
            f"--from, --to: these are {num_pairs} pairs of rank, rank and layer: at most "
            f"{MAX_PAIRED_LAYERS} can be planned"
        )
    return prefill, decode


class _Handoff:
    def __init__(
        self, prefill: PlannedEngine, decode: PlannedEngine, spans: Spans, *, slot_bytes: int
    ) -> None:
        self._engine, self._spans, self._slot_bytes = decode.engine, spans, slot_bytes
        self._holder = _Placed(prefill, spans, step=PREFILL_STEP)
        self._reader = _Placed(decode, spans, step=DECODE_STEP)
        holders, readers = self._holder.ranks, self._reader.ranks
        read_map = ReadMap(*([one.rank for one in ranks.values()] for ranks in (holders, readers)))
        self._shares, self._joined = read_map.shares(), read_map.joined()
        self.num_bytes, self._joined_bytes = (
            span_bytes(bytes_by_group(shares, decode.engine), spans)
            for shares in (self._shares, self._joined)
        )
        self._repeated_bytes = self.num_bytes - self._joined_bytes
        self._runs = RunPlan(holders, readers, self._shares)
        self._num_runs = self._runs.num_runs(spans)
        self._staged = staged_plans(holders, readers, self._joined, slot_bytes=slot_bytes)
        self._num_staged_runs = sum(one.num_runs(spans) for one in self._staged)

    def reads(self) -> Iterator[PlannedRead]:
        ordered = sorted(self._shares, key=attrgetter("reader", "group", "holder", "layers"))
        for share in ordered:
            start, stop = self._spans[share.group]
            if start == stop:
                continue
            group = self._engine.group(share.group)
            yield PlannedRead(
                prefill_rank=share.holder,
                decode_rank=share.reader,
                group=share.group,
                layers=share.layers,
                parts=share.parts,
                heads=(share.first_head, share.first_head + share.num_heads),
                positions=(start, stop),
                num_bytes=(stop - start) * position_bytes(share, group),
            )

    def direct_path(self) -> PathPlan:
        def runs() -> Iterator[Runs]:
            yield self._runs.runs(self._holder.tables, self._reader.tables, self._spans)

        descriptors = _num_descriptors(self._num_runs, runs())
        return PathPlan(descriptors=descriptors, num_bytes=self.num_bytes)

    def staged_path(self) -> PathPlan | None:
        if not self.num_bytes or not self._staged:
            return None
        tile_bytes = usual_tile_bytes(self.num_bytes, least=1, slot_bytes=self._slot_bytes)
        tiles = [
            (plan, tile)
            for plan in self._staged
            for tile in plan.tiles(self._spans[plan.group], tile_bytes=tile_bytes)
        ]
        runs = (plan.reads(self._holder.tables, tile, slot_at=0) for plan, tile in tiles)
        descriptors = _num_descriptors(self._num_staged_runs, runs)
        return self._slotted(descriptors=descriptors, num_tiles=len(tiles))

    def packed_path(self) -> PathPlan | None:
        least = least_tile_bytes(self._joined, self._engine)
        if not self.num_bytes or least > self._slot_bytes:
            return None
        tile_bytes = usual_tile_bytes(self.num_bytes, least=least, slot_bytes=self._slot_bytes)
        num_tiles = 0
        for share in self._joined:
            group, span = self._engine.group(share.group), self._spans[share.group]
            num_tiles += len(cut_into_tiles(share, group, span, tile_bytes=tile_bytes))
        return self._slotted(descriptors=num_tiles, num_tiles=num_tiles)

    def _slotted(self, *, descriptors: int, num_tiles: int) -> PathPlan:
        return PathPlan(
            descriptors=descriptors,
            num_bytes=self._joined_bytes,
            num_tiles=num_tiles,
            scattered_bytes=self.num_bytes,
        )

    def choose(self, paths: Collection[Path]) -> Path:
        return choose_path(
            paths,
            num_bytes=self.num_bytes,
            num_runs=self._num_runs,
            repeated_bytes=self._repeated_bytes,
            num_staged_runs=self._num_staged_runs,
        )

    def reason(self, choice: Path) -> str:
        long = bytes_text(LONG_RUN_BYTES)
        if not self.num_bytes:
            return "there is nothing to read"
        if choice is Path.MAPPED:
            return "memory that is mapped is copied once"
        if choice is Path.DIRECT:
            if has_long_runs(self.num_bytes, self._num_runs) and not self._repeated_bytes:
                return f"runs have {long} or more"
            is_small = is_little(self.num_bytes, self._num_runs)
            return "it is so little" if is_small else "slots are too small"
        if self._repeated_bytes:
            return "several decode ranks read the same"
        but = ", blocks have longer ones" if choice is Path.STAGED else ""
        return f"runs are under {long}{but}"


def _num_descriptors(num_runs: int, listed: Iterable[Runs]) -> int:
    """Only count runs that are too many to list."""
    if num_runs > MAX_MERGED:
        return num_runs
    return sum(len(runs.reads().local) for runs in listed)


class _Placed:
    def __init__(self, planned: PlannedEngine, spans: Spans, *, step: float) -> None:
        engine, layout = planned.engine, KvLayout(planned.axes)
        self.tables, num_blocks = dict[str, BlockTable](), dict[str, int]()
        for group in engine.groups:
            span = spans.get(group.name, (0, 0))  # an optional group may be missing
            table, cache_blocks = _scattered_table(group, span, step=step)
            self.tables[group.name], num_blocks[group.name] = table, cache_blocks
        self.ranks: dict[int, PlacedRank] = {}
        for number in range(engine.num_ranks):
            rank = lay_out_rank(engine, number, layout, num_blocks=num_blocks)
            (segment,) = rank.segments
            if segment.size_bytes > MAX_RANK_BYTES:
                raise ConfigError(
                    f"--from, --to: a rank would have {segment.size_bytes} bytes of KV"
                )
            moved = tuple(region for region in rank.regions if region.group in spans)
            rank = msgspec.structs.replace(rank, regions=moved)
            address = (number + 1) * RANK_DISTANCE_BYTES
            self.ranks[number] = PlacedRank(engine, rank, {segment.segment_id: address})


def _scattered_table(group: GroupSpec, span: Span, *, step: float) -> tuple[BlockTable, int]:
    start, stop = span
    first = start // group.block_size
    needed = num_blocks_for(stop, group.block_size) - first if stop > start else 0
    if needed > MAX_BLOCKS:
        raise ConfigError(
            f"--tokens: {stop} tokens are {needed} blocks of group '{group.name}', at most "
            f"{MAX_BLOCKS} are allowed"
        )
    # Ids are distinct: the cache is a power of 2, and the distance is odd.
    cache_blocks = max(16, 1 << (2 * needed - 1).bit_length())
    ids = np.arange(needed, dtype=np.int64) * (int(cache_blocks * step) | 1) % cache_blocks
    return BlockTable.of(ids, first_block=first), cache_blocks


def _print(plan: HandoffPlan, console: Console) -> None:
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
    console.print(
        f"about {time_text(plan.seconds)}, at the rates that agents assume before their first read"
    )
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
