"""Chooses the path of each piece, by what it is predicted to take and what earlier ones took.

Refuses paths that one side cannot take: packing is turned off there, or a slot is too small.
"""

from collections.abc import Collection
from weakref import WeakKeyDictionary

import structlog

from kvbus.agent.calibration import calibrated_rates
from kvbus.agent.service import Agent
from kvbus.errors import ErrorCode, LocalError
from kvbus.planning import Path, PeerRates, Rates
from kvbus_decode.config import DecodeConfig
from kvbus_decode.piece import Piece, PieceRead
from kvbus_decode.routes import Route

log = structlog.get_logger()

DIRECT_ONLY = (Path.DIRECT,)


class PathChooser:
    """The rates of this machine, and of each route what was learned."""

    def __init__(self, agent: Agent, config: DecodeConfig) -> None:
        self._agent, self._config = agent, config
        self._rates = Rates(slots_in_flight=config.boxes_in_flight)
        self._by_route: WeakKeyDictionary[Route, PeerRates] = WeakKeyDictionary()
        if config.calibrate:
            agent.tasks.start_soon(self._calibrate)

    def choose(self, read: PieceRead) -> tuple[Path, int]:
        """The path of a piece, and the size of its boxes in bytes, 0 without.

        A box has to fit the slots of both sides; without a choice, that is for `cut_into_boxes` to
        refuse. Raises `LocalError` when the configuration forces a path that cannot be taken.
        """
        piece = read.piece
        paths = self._paths(piece.route)
        num_descriptors = _num_descriptors(piece)
        if paths == DIRECT_ONLY or not num_descriptors:  # none: it only zeroes a tail
            return Path.DIRECT, 0
        if Path.DIRECT in paths and self._is_plain(piece, num_descriptors):
            return Path.DIRECT, 0
        work, slot_bytes = piece.route.work, self._slot_bytes(piece.route)
        limit = slot_bytes if Path.DIRECT in paths else None
        read.shape = work.shape(piece.spans, slot_bytes=limit)
        if not any(read.shape.work(path) for path in paths):
            raise LocalError(
                f"key 'path' of the configuration forces '{self._config.path}', which cannot be "
                "taken: the decode engine's regions have different orders",
                code=ErrorCode.CONFIG,
            )
        choice = self._peer(piece.route).choose(read.shape, paths=paths)
        if choice.box_bytes is None:
            return choice.path, 0
        return choice.path, min(
            slot_bytes, max(choice.box_bytes, work.least_box_bytes(choice.path))
        )

    def observe(self, read: PieceRead, path: Path, seconds: float) -> None:
        """A piece has landed; short ones say nothing of the rates."""
        if read.shape is not None:
            self._peer(read.piece.route).observe(read.shape, path, seconds=seconds)

    async def _calibrate(self) -> None:
        name = f"{self._agent.transport.name}-calibration"
        self._rates = await calibrated_rates(name, slots_in_flight=self._config.boxes_in_flight)

    def _is_plain(self, piece: Piece, num_descriptors: int) -> bool:
        """Whether direct is best without asking the model.

        Its descriptors cost less than the first request of the other paths would, or than half of
        a gather of its bytes.
        """
        rates = self._rates
        spent_s = num_descriptors * rates.seconds_per_descriptor
        if spent_s <= rates.seconds_per_request:
            return True
        return spent_s <= piece.route.num_bytes(piece.spans) / rates.gather_bytes_per_s / 2

    def _paths(self, route: Route) -> Collection[Path]:
        """What the configuration wants and both sides can do."""
        forced = self._config.path
        wanted = tuple(Path) if forced == "auto" else (Path(forced),)
        able = [Path.DIRECT]
        if all(source.slot_bytes for source in route.sources):
            able.append(Path.REORDERED)
            if self._agent.staging is not None:
                able.append(Path.PACKED)
        found = tuple(path for path in Path if path in able and path in wanted)
        if not found:
            raise LocalError(
                f"key 'path' of the configuration forces '{forced}', but staging_bytes is 0 here "
                "or at the prefill agent",
                code=ErrorCode.CONFIG,
            )
        return found

    def _peer(self, route: Route) -> PeerRates:
        known = self._by_route.get(route)
        if known is None:
            slot_bytes = max(1, self._slot_bytes(route))
            known = self._by_route[route] = PeerRates(self._rates, slot_bytes=slot_bytes)
        return known

    def _slot_bytes(self, route: Route) -> int:
        """The smallest slot on the way."""
        slots = [source.slot_bytes for source in route.sources]
        if self._agent.staging is not None:
            slots.append(self._agent.staging.slot_bytes)
        return min(slots)


def _num_descriptors(piece: Piece) -> int:
    """READs of the direct path, about."""
    plans = piece.route.plans(piece.spread)
    return sum(plan.direct.num_descriptors(piece.spans) for plan in plans)
