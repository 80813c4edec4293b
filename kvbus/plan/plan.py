"""A plan: what one handoff would read from whom, and what it would take on each path.

Refuses, with the errors of `kvbus.planning`, two engines whose KV is not the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvbus.errors import ConfigError
from kvbus.geometry import DTYPE_SIZES_BYTES
from kvbus.plan.paths import Handoff, PathPlan, plan_paths
from kvbus.plan.pretended import DECODE_STEP, PREFILL_STEP, pretend
from kvbus.plan.spec import Side
from kvbus.planning import ReadMap, Share, Spans, check_compatible, whole_spans
from kvbus.planning.cost import Rates
from kvbus.planning.fetch_shape import Path

DEFAULT_SLOT_BYTES = 8 << 20
MAX_PAIRED_LAYERS = 1 << 19


@dataclass(frozen=True, slots=True)
class Request:
    """The handoff: tokens [first_token, num_tokens) of a request.

    ``path`` None lets the cost model choose; ``is_contiguous`` block tables are in order.
    """

    num_tokens: int
    first_token: int = 0
    path: Path | None = None
    is_contiguous: bool = False


@dataclass(frozen=True, slots=True)
class Means:
    """What there is to move the bytes with; without ``rates_from`` the rates are the defaults."""

    rates: Rates
    rates_from: str | None = None
    slot_bytes: int = DEFAULT_SLOT_BYTES


@dataclass(frozen=True, slots=True)
class Read:
    """A share, the positions of its block table that are read, and their bytes."""

    share: Share
    positions: tuple[int, int]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What `make_plan` found; ``paths`` are those that the handoff can take."""

    prefill: Side
    decode: Side
    request: Request
    means: Means
    reads: tuple[Read, ...]
    paths: tuple[PathPlan, ...]
    chosen: PathPlan

    @property
    def num_bytes(self) -> int:
        """Bytes that the decode engine needs."""
        return sum(read.num_bytes for read in self.reads)

    @property
    def unread_ranks(self) -> tuple[int, ...]:
        """Prefill ranks that nothing is read from."""
        holders = {read.share.holder for read in self.reads}
        return tuple(rank for rank in range(self.prefill.engine.num_ranks) if rank not in holders)

    def path(self, path: Path) -> PathPlan | None:
        """What it would be on ``path``."""
        return next((one for one in self.paths if one.path is path), None)


def make_plan(prefill: Side, decode: Side, request: Request, means: Means) -> Plan:
    """The plan of ``request``.

    Raises `GeometryError` (``incompatible``) when the engines differ in more than shape, and
    `ConfigError` when the plan would be too large or the path is not possible.
    """
    check_compatible(prefill.engine, decode.engine)
    _refuse_large(prefill, decode)
    spans = whole_spans(decode.engine.groups, request.first_token, request.num_tokens)
    in_order = request.is_contiguous
    holder = pretend(prefill, spans, step=None if in_order else PREFILL_STEP)
    reader = pretend(decode, spans, step=None if in_order else DECODE_STEP)
    specs = ([one.rank for one in engine.ranks.values()] for engine in (holder, reader))
    shares = ReadMap(*specs).shares()
    handoff = Handoff(holder, reader, shares, spans)
    paths = plan_paths(handoff, means.rates, slot_bytes=means.slot_bytes)
    return Plan(
        prefill=prefill,
        decode=decode,
        request=request,
        means=means,
        reads=tuple(_reads(decode, shares, spans)),
        paths=paths,
        chosen=_chosen(paths, request.path),
    )


def _chosen(paths: tuple[PathPlan, ...], wanted: Path | None) -> PathPlan:
    if wanted is None:
        return next(one for one in paths if one.is_fastest)
    for one in paths:
        if one.path is wanted:
            return one
    possible = ", ".join(one.path for one in paths)
    raise ConfigError(f"--path: this handoff cannot take {wanted}, it can take {possible}")


def _reads(decode: Side, shares: tuple[Share, ...], spans: Spans) -> Iterator[Read]:
    for share in sorted(shares, key=lambda one: (one.reader, one.group, one.holder, one.layers)):
        start, stop = spans[share.group]
        group = decode.engine.group(share.group)
        head_bytes = group.part_shape(share.parts[0]).head_dim * DTYPE_SIZES_BYTES[group.dtype]
        num_heads = len(share.layers) * len(share.parts) * share.num_heads
        if stop > start:
            yield Read(share, (start, stop), (stop - start) * num_heads * head_bytes)


def _refuse_large(prefill: Side, decode: Side) -> None:
    num_layers = sum(len(group.layers) for group in decode.engine.groups)
    num_pairs = prefill.engine.tp_size * decode.engine.tp_size * num_layers
    if num_pairs > MAX_PAIRED_LAYERS:
        raise ConfigError(
            f"--from, --to: tp={prefill.engine.tp_size} and tp={decode.engine.tp_size} with"
            f" layers={num_layers} are {num_pairs} pairs of rank, rank and layer:"
            f" at most {MAX_PAIRED_LAYERS} can be planned"
        )
