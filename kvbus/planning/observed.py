"""Owns what was learned of one peer: its wire, and how much longer each path took than predicted.

It counts fetches and reads no clock, so the same observations give the same choices.
"""

from bisect import bisect
from collections.abc import Collection, Hashable
from dataclasses import dataclass, replace
from math import exp, log

from kvbus.planning.cost import Choice, Rates, choose, predict
from kvbus.planning.fetch_shape import ALL_PATHS, FetchShape, Path

MAX_RATIO = 32.0
WEIGHT = 0.3
"""Of an observation that follows at once; one after a long time weighs up to 1."""
AGREEMENT = 1.25
PATIENCE = 32
MAX_PATIENCE = 1024
CURIOSITY = 0.75
"""What a path's ratio goes to while nobody takes it."""
SIZES_BYTES = (1 << 20, 16 << 20)
"""Below, between and above these, paths are corrected apart: what is fixed is another share."""
FAR_WIRE_BYTES_PER_S = 3e9
"""What the wire to another machine is taken for until it was used: 25 Gbit/s."""
LONG_READ_BYTES = 1 << 20
"""A READ from which on its bytes take most of its time."""


@dataclass(slots=True)
class _Memory:
    """What is known of one path for one class of sizes."""

    log_ratio: float = 0.0
    num_fetches_since: int = 0
    patience: int = PATIENCE

    @property
    def freshness(self) -> float:
        """1 for as long as the patience lasts, then half for each further such time."""
        return float(0.5 ** max(0.0, self.num_fetches_since / self.patience - 1))

    @property
    def ratio(self) -> float:
        fresh = self.freshness
        return exp(self.log_ratio * fresh + log(CURIOSITY) * (1 - fresh))

    def observe(self, log_ratio: float) -> None:
        if abs(log_ratio - self.log_ratio) > log(AGREEMENT):
            self.patience = PATIENCE
        else:
            self.patience = min(2 * self.patience, MAX_PATIENCE)
        weight = 1 - (1 - WEIGHT) * self.freshness
        self.log_ratio += weight * (log_ratio - self.log_ratio)
        self.num_fetches_since = 0


class PeerRates:
    """Chooses the paths of the fetches from one peer, and learns from what they took.

    Per path and class of sizes it keeps the ratio of observed to predicted seconds, geometric
    mean with exponential weights, within 1/32 to 32. A path that is slower than predicted loses.
    It is tried again: after 32 fetches on other paths its ratio starts to go to 3/4, so that
    what was unlucky once, or was never taken though nearly as good, gets its turn. Each
    observation that agrees with what is known doubles that patience, up to 1,024 fetches: what is
    really slow is taken seldom.

    ``rates`` are of reads within this machine. The wire to a ``far`` peer is another: one that is
    slower is assumed, and READs show what it is.
    """

    def __init__(self, rates: Rates, *, slot_bytes: int, far: bool = False) -> None:
        self.rates = rates
        if far:
            wire = min(rates.wire_bytes_per_s, FAR_WIRE_BYTES_PER_S)
            self.rates = replace(rates, wire_bytes_per_s=wire)
        self._far, self._wire_seen = far, False
        self._slot_bytes = slot_bytes
        self._memories: dict[tuple[Path, int], _Memory] = {}

    def choose(self, shape: FetchShape, *, paths: Collection[Path] = ALL_PATHS) -> Choice:
        """The fastest of ``paths``, as far as is known; raises `LocalError` when there is none."""
        return choose(
            shape,
            self.rates,
            slot_bytes=self._slot_bytes,
            corrections={path: self.ratio(shape, path) for path in ALL_PATHS},
            paths=paths,
        )

    def observe(self, shape: FetchShape, path: Path, *, seconds: float) -> None:
        """A fetch by ``path`` spent so long reading, from its first request to its last byte.

        Only of fetches that completed, and had no other beside them (`Overlaps`): what one took
        under load says more of the load than of its path. Raises `LocalError` when the fetch has no
        such path.
        """
        predicted_s = predict(shape, path, self.rates, slot_bytes=self._slot_bytes).seconds
        if predicted_s <= 0:
            return
        for other in ALL_PATHS:
            self._memory(shape, other).num_fetches_since += 1
        ratio = min(max(seconds / predicted_s, 1 / MAX_RATIO), MAX_RATIO)
        self._memory(shape, path).observe(log(ratio))

    # All paths use the wire, so one READ says of all of them what they take: a path need not be
    # tried for that, which may take many times as long as another where ranks hold replicas. Other
    # READs share the wire, and the first may wait for a connection. So each READ says only that the
    # wire is at least so fast: the first takes the place of what was assumed, and one that is much
    # faster that of those before. A wire that has become slower is seen by the ratios.
    def observe_read(self, *, num_bytes: int, num_descriptors: int, seconds: float) -> None:
        """A READ landed so long after it was posted; one of few bytes says nothing of the wire."""
        if not self._far or num_bytes < LONG_READ_BYTES:
            return
        fixed_s = self.rates.seconds_per_read
        fixed_s += num_descriptors * self.rates.seconds_per_descriptor
        seen = num_bytes / max(seconds - fixed_s, seconds / 4)
        if not self._wire_seen or seen > AGREEMENT * self.rates.wire_bytes_per_s:
            self.rates = replace(self.rates, wire_bytes_per_s=seen)
            self._wire_seen = True
            self._memories.clear()

    def ratio(self, shape: FetchShape, path: Path) -> float:
        """What predictions of such fetches by ``path`` are multiplied by."""
        return self._memory(shape, path).ratio

    def _memory(self, shape: FetchShape, path: Path) -> _Memory:
        size = bisect(SIZES_BYTES, shape[path].num_bytes) if path in shape else 0
        return self._memories.setdefault((path, size), _Memory())


class Overlaps:
    """Which of the things that go on had another one beside them at any time."""

    def __init__(self) -> None:
        self._running: set[Hashable] = set()
        self._crowded: set[Hashable] = set()

    def begin(self, key: Hashable) -> None:
        """It goes on from now."""
        if self._running:
            self._crowded.add(key)
        if len(self._running) == 1:  # of more, all are marked already
            self._crowded |= self._running
        self._running.add(key)

    def end(self, key: Hashable) -> bool:
        """It has ended; True when it was alone from its beginning."""
        self._running.discard(key)
        was_alone = key not in self._crowded
        self._crowded.discard(key)
        return was_alone
