"""Chooses the path of each piece, by what it is predicted to take and what earlier ones took.

Refuses paths that one side cannot take: packing is turned off there, or a slot is too small.
"""

from weakref import WeakKeyDictionary

import structlog

from kvbus.agent.process.calibration import Calibration
from kvbus.agent.process.service import Agent
from kvbus.planning import Path, PeerRates
from kvbus_decode.config import DecodeConfig
from kvbus_decode.peer.route import Route
from kvbus_decode.read.open_paths import no_common_order, open_paths
from kvbus_decode.read.piece import Piece, PieceRead

log = structlog.get_logger()

DIRECT_ONLY = (Path.DIRECT,)


class PathChooser:
    """The rates of this machine, and of each route what was learned."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self._calibration = Calibration(
            slots_in_flight=config.boxes_in_flight, on_change=self._forget_peers
        )
        self._by_route: WeakKeyDictionary[Route, PeerRates] = WeakKeyDictionary()
        self._packed_since: WeakKeyDictionary[Route, float] = WeakKeyDictionary()
        """When the first piece of each route had come through slots."""
        if config.calibrate:
            name = f"{agent.transport.name}-calibration"
            agent.tasks.start_soon(self._calibration.measure_reads, name)

    def choose(self, read: PieceRead) -> tuple[Path, int]:
        """The path of a piece, and the size of its boxes in bytes, 0 without.

        A box has to fit the slots of both sides; where no path has boxes that do, that is for
        `cut_into_boxes` to refuse. Raises `ConfigError` when no path is open.
        """
        piece = read.piece
        packs_here = self._agent.staging.packs
        paths = open_paths(piece.route, self._config.path, packs_here=packs_here)
        if paths == DIRECT_ONLY or _moves_nothing(piece):
            return paths[0], 0
        if Path.DIRECT in paths and self._is_plain(piece):
            return Path.DIRECT, 0
        work, slot_bytes = piece.route.work, self._slot_bytes(piece.route)
        read.shape = work.shape(piece.spans, slot_bytes=slot_bytes)
        if not any(read.shape.work(path) for path in paths):
            read.shape = work.shape(piece.spans)
        if not any(read.shape.work(path) for path in paths):
            raise no_common_order(self._config.path)
        choice = self._peer(piece.route).choose(read.shape, paths=paths)
        if choice.box_bytes is None:
            return choice.path, 0
        if self._config.calibrate and not self._calibration.copies_asked:
            self._agent.tasks.start_soon(self._calibration.measure_copies)
        return choice.path, min(
            slot_bytes, max(choice.box_bytes, work.least_box_bytes(choice.path))
        )

    def observe(self, read: PieceRead, path: Path, seconds: float) -> None:
        """A piece has landed; short ones say nothing of the rates.

        Nor do those that began before the first had come through slots: for that one, both agents
        may have imported torch.
        """
        if read.shape is None:
            return
        route, now = read.piece.route, self._agent.loop.time()
        if path is not Path.DIRECT and now - seconds < self._packed_since.setdefault(route, now):
            return
        self._peer(route).observe(read.shape, path, seconds=seconds)

    def _forget_peers(self) -> None:
        """What was learned of each is a correction of rates that are others now."""
        self._by_route.clear()

    def _is_plain(self, piece: Piece) -> bool:
        """Whether direct is best without asking the model.

        Its descriptors cost less than the first request of the other paths would, or than half of
        a gather of its bytes.
        """
        rates = self._calibration.rates
        spent_s = _num_descriptors(piece) * rates.seconds_per_descriptor
        if spent_s <= rates.seconds_per_request:
            return True
        return spent_s <= piece.route.num_bytes(piece.spans) / rates.gather_bytes_per_s / 2

    def _peer(self, route: Route) -> PeerRates:
        known = self._by_route.get(route)
        if known is None:
            slot_bytes = max(1, self._slot_bytes(route))
            rates = self._calibration.rates
            known = self._by_route[route] = PeerRates(rates, slot_bytes=slot_bytes)
        return known

    def _slot_bytes(self, route: Route) -> int:
        """The smallest slot on the way."""
        slots = [source.slot_bytes for source in route.sources]
        if self._agent.staging.packs:
            slots.append(self._agent.staging.slot_bytes)
        return min(slots)


def _num_descriptors(piece: Piece) -> int:
    """READs of the direct path, about."""
    plans = piece.route.plans(piece.spread)
    return sum(plan.direct.num_descriptors(piece.spans) for plan in plans if plan.direct)


def _moves_nothing(piece: Piece) -> bool:
    """Whether it has no positions, as one that only zeroes a tail."""
    return all(stop <= start for start, stop in piece.spans.values())
