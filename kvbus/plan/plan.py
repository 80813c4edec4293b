"""A plan: what one handoff would read from whom, and what it would take on each path.

Refuses, with the errors of `kvbus.planning`, two engines whose KV is not the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from kvbus.errors import ConfigError
from kvbus.geometry import DTYPE_SIZES_BYTES
from kvbus.plan.paths import PathPlan, PlannedHandoff, plan_paths
from kvbus.plan.spec import PlannedEngine
from kvbus.plan.synthetic_engine import synthesize
from kvbus.planning import ReadMap, Share, Spans, check_compatible, whole_spans
from kvbus.planning.cost import Rates
from kvbus.planning.fetch_shape import Path

MAX_PAIRED_LAYERS = 1 << 19
DEFAULT_SLOT_BYTES = 8 << 20
PREFILL_STEP, DECODE_STEP = 0.618, 0.414


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """Tokens [first_token, num_tokens) of a request, and what its time depends on.

    ``path`` None lets the cost model choose; ``is_contiguous`` block tables are in order. Without
    ``rates_from``, the name of a file, the rates are the defaults.
    """

    num_tokens: int
    first_token: int = 0
    path: Path | None = None
    is_contiguous: bool = False
    rates: Rates = field(default_factory=Rates)
    rates_from: str | None = None
    slot_bytes: int = DEFAULT_SLOT_BYTES


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
    """What `make_plan` found; ``paths`` are those that the handoff can take."""

    prefill: PlannedEngine
    decode: PlannedEngine
    request: PlannedRequest
    reads: tuple[PlannedRead, ...]
    paths: dict[Path, PathPlan]
    fastest: Path
    chosen: Path

    @property
    def num_bytes(self) -> int:
        """Bytes that the decode engine needs."""
        return sum(read.num_bytes for read in self.reads)

    @property
    def unread_ranks(self) -> tuple[int, ...]:
        """Prefill ranks that nothing is read from."""
        holders = {read.prefill_rank for read in self.reads}
        return tuple(rank for rank in range(self.prefill.engine.num_ranks) if rank not in holders)


def make_plan(prefill: PlannedEngine, decode: PlannedEngine, request: PlannedRequest) -> Plan:
    """The plan of ``request``.

    Raises `GeometryError` (``incompatible``) when the engines differ in more than shape, and
    `ConfigError` when the plan would be too large or the path is not possible.
    """
    check_compatible(prefill.engine, decode.engine)
    _refuse_large(prefill, decode)
    spans = whole_spans(decode.engine.groups, request.first_token, request.num_tokens)
    in_order = request.is_contiguous
    holder = synthesize(prefill, spans, step=None if in_order else PREFILL_STEP)
    reader = synthesize(decode, spans, step=None if in_order else DECODE_STEP)
    specs = ([one.rank for one in engine.ranks.values()] for engine in (holder, reader))
    shares = ReadMap(*specs).shares()
    handoff = PlannedHandoff(holder, reader, shares, spans)
    paths, fastest = plan_paths(handoff, request.rates, slot_bytes=request.slot_bytes)
    chosen = request.path or fastest
    if chosen not in paths:
        possible = ", ".join(paths)
        raise ConfigError(f"--path: this handoff cannot take {chosen}, it can take {possible}")
    reads = tuple(_reads(decode, shares, spans))
    return Plan(prefill, decode, request, reads, paths, fastest, chosen)


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
