"""Chooses the path of each chunk: mapped where it is open, else by what it is predicted to take.

What earlier chunks took that had no others beside them corrects the predictions.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import structlog

from kvbus.agent.process.calibration import Calibration
from kvbus.agent.process.service import Agent
from kvbus.errors import ErrorCode, LocalError
from kvbus.planning import FetchShape, Path, PeerRates, Rates, Spans
from kvbus.transport import ReadOutcome
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.route import Route
from kvbus_decode.read.open_paths import no_common_order, open_paths

log = structlog.get_logger()

WITHOUT_BOXES = (Path.DIRECT, Path.MAPPED)
"""Paths that need nothing of the prefill agent that is asked for under an epoch."""
THROUGH_SLOTS = (Path.PACKED, Path.REORDERED)


@dataclass(frozen=True, slots=True)
class PathChoice:
    """A path, the size of its boxes in bytes (0 without), and the shape that it was predicted by.

    ``shape`` is None when nothing had to be predicted: then nothing is learned either.
    """

    path: Path
    box_bytes: int = 0
    shape: FetchShape | None = None


DIRECT = PathChoice(Path.DIRECT)
MAPPED = PathChoice(Path.MAPPED)


class PathChooser:
    """The rates of this machine, and of each route what was learned."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self._calibration = Calibration(
            slots_in_flight=config.boxes_in_flight, on_change=self._forget_peers
        )
        self._paths: WeakKeyDictionary[Route, tuple[Path, ...]] = WeakKeyDictionary()
        self._by_route: WeakKeyDictionary[Route, PeerRates] = WeakKeyDictionary()
        self._packed_since: WeakKeyDictionary[Route, float] = WeakKeyDictionary()
        """When the first chunk of each route had come through slots."""
        self._calibrate()

    @property
    def rates(self) -> Rates:
        """Of this machine, as far as they were measured."""
        return self._calibration.rates

    def choose(
        self, route: Route, spans: Spans, replica_index: int, *, leased: bool = True
    ) -> PathChoice:
        """The path of a chunk, which `Chunk` describes; one of `WITHOUT_BOXES` if not ``leased``.

        A box has to fit the slots of both sides; where no path has boxes that do, that is for
        `cut_into_boxes` to refuse. Raises `ConfigError` when no path is open.
        """
        paths = self._paths.get(route) or self._open_paths(route)
        if Path.MAPPED in paths and not route.is_mapped:
            paths = self._open_paths(route)
        if not leased:
            paths = _without_boxes(paths)
        obvious = self._obvious(route, paths, spans, replica_index)
        if obvious is not None:
            return obvious
        work, slot_bytes = route.work, self._slot_bytes(route)
        shape = work.shape(spans, slot_bytes=slot_bytes)
        if not any(path in shape for path in paths):
            shape = work.shape(spans)
        if not any(path in shape for path in paths):
            raise no_common_order(self._config.path)
        choice = self._peer(route).choose(shape, paths=paths)
        if choice.box_bytes is None:
            return PathChoice(choice.path, shape=shape)
        if self._config.calibrate and not self._calibration.copies_asked:
            self._agent.tasks.start_soon(self._calibration.measure_copies)
        box_bytes = min(slot_bytes, max(choice.box_bytes, work.least_box_bytes(choice.path)))
        return PathChoice(choice.path, box_bytes, shape)

    def _obvious(
        self, route: Route, paths: tuple[Path, ...], spans: Spans, replica_index: int
    ) -> PathChoice | None:
        """What needs no prediction: one path, nothing to move, mapped memory, very little to READ.

        Mapped memory is copied once, by one core; each other path moves the bytes as often or more,
        and what was learned of one beside many others would say otherwise.
        """
        if len(paths) == 1 and paths[0] in WITHOUT_BOXES:
            return PathChoice(paths[0])
        if all(stop <= start for start, stop in spans.values()):  # it only zeroes a tail
            return PathChoice(paths[0])
        if Path.MAPPED in paths:
            return MAPPED
        is_plain = Path.DIRECT in paths and self._is_plain(route, spans, replica_index)
        return DIRECT if is_plain else None

    def _open_paths(self, route: Route) -> tuple[Path, ...]:
        """They stay open, or closed, for as long as the route is used, but for memory that ends."""
        packs_here = self._agent.staging.packs
        paths = open_paths(route, self._config.path, packs_here=packs_here)
        self._calibrate()
        self._paths[route] = paths
        return paths

    def _calibrate(self) -> None:
        """Measure READs as soon as there are some: it makes NIXL agents, whose backends listen."""
        transport = self._agent.transport
        if self._config.calibrate and transport.is_open and not self._calibration.reads_asked:
            name = f"{transport.name}-calibration"
            self._agent.tasks.start_soon(self._calibration.measure_reads, name)

    def observe(self, route: Route, choice: PathChoice, seconds: float) -> None:
        """A chunk has landed that had no other beside it.

        One that began before the first had come through slots says nothing: for that one, both
        agents may have imported torch.
        """
        if choice.shape is None:
            return
        now, path = self._agent.loop.time(), choice.path
        if path in THROUGH_SLOTS and now - seconds < self._packed_since.setdefault(route, now):
            return
        self._peer(route).observe(choice.shape, path, seconds=seconds)

    def observe_read(self, route: Route, read: ReadOutcome, seconds: float) -> None:
        """A READ of a chunk has landed."""
        self._peer(route).observe_read(
            num_bytes=read.num_bytes, num_descriptors=read.num_descriptors, seconds=seconds
        )

    def _forget_peers(self) -> None:
        """What was learned of each is a correction of rates that are others now."""
        self._by_route.clear()

    def _is_plain(self, route: Route, spans: Spans, replica_index: int) -> bool:
        """Whether direct is best without asking the model.

        Its descriptors cost less than the first request of the other paths would, or than half of
        a gather of its bytes; and next to nothing is read for several ranks.
        """
        rates = self._peer(route).rates
        repeated_s = route.work.repeated_bytes(spans) / rates.wire_bytes_per_s
        if repeated_s > rates.seconds_per_request:
            return False
        plans = route.plans(replica_index)
        num = sum(plan.direct.num_descriptors(spans) for plan in plans if plan.direct)
        spent_s = num * rates.seconds_per_descriptor
        if spent_s <= rates.seconds_per_request:
            return True
        return spent_s <= route.num_bytes(spans) / rates.gather_bytes_per_s / 2

    def _peer(self, route: Route) -> PeerRates:
        known = self._by_route.get(route)
        if known is None:
            slot_bytes = max(1, self._slot_bytes(route))
            rates = self._calibration.rates
            far = not all(source.near for source in route.sources)
            known = self._by_route[route] = PeerRates(rates, slot_bytes=slot_bytes, far=far)
        return known

    def _slot_bytes(self, route: Route) -> int:
        """The smallest slot on the way."""
        slots = [source.slot_bytes for source in route.sources]
        if self._agent.staging.packs:
            slots.append(self._agent.staging.slot_bytes)
        return min(slots)


def _without_boxes(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Those of ``paths`` that need no lease; raises `LocalError` when they have closed."""
    found = tuple(path for path in paths if path in WITHOUT_BOXES)
    if not found:
        message = "the path that needs no lease has closed while the fetch waited"
        raise LocalError(message, code=ErrorCode.ENGINE_LOST)
    return found
