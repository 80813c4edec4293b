"""What a simulated world is like: size, network, faults, load, and the limits of its agents."""

from dataclasses import dataclass, field, replace

from kvbus_decode.fetch.state import FetchLimits
from kvbus_decode.read.table import ReadLimits
from kvbus_prefill.meeting.entry import MeetingLimits
from kvbus_prefill.offer.entry import OfferLimits
from kvbus_prefill.slots.entry import SlotLimits


@dataclass(frozen=True, slots=True)
class NetworkSettings:
    """Messages: shares that are lost or come twice, and how long they take, in seconds.

    A share of ``slow`` takes up to ``slow_s``, so others overtake it.
    """

    loss: float = 0.0
    duplicates: float = 0.001
    delay_s: float = 2e-4
    slow: float = 0.01
    slow_s: float = 0.05


@dataclass(frozen=True, slots=True)
class FaultSettings:
    """How often one process meets a fault, in seconds of its life; 0 for never.

    ``clock_drift`` is the most by which the clock of a process is fast or slow. Bits flip in a
    share of the blocks that are read by a fetch which compares.
    """

    stop_every_s: float = 60.0
    longest_stop_s: float = 12.0
    crash_every_s: float = 120.0
    engine_loss_every_s: float = 300.0
    clock_drift: float = 1e-4
    failed_reads: float = 0.002
    stalled_reads: float = 0.002
    flipped_bits: float = 0.002


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """What the engines do; shares are of the offers, rates of one prefill engine.

    A share is ``met``: both sides are told at once, by a name, and either may be the first.
    """

    offers_per_s: float = 10.0
    blocks: int = 256
    largest_offer: int = 8
    open_offers: float = 0.25
    met: float = 0.15
    with_state: float = 0.15
    unread: float = 0.005
    second_readers: float = 0.02
    read_again: float = 0.5
    withdrawn: float = 0.01
    cancelled: float = 0.02
    impatient: float = 0.02
    altered: float = 0.002
    compared: float = 0.1
    offer_ttl_s: float = 30.0
    fetch_timeout_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Settings:
    """One kind of world; ``agents`` are so many prefill agents, and as many decode agents.

    Tables remember few ended entries: those of a hundred agents share one memory here.
    """

    agents: int = 100
    network: NetworkSettings = field(default_factory=NetworkSettings)
    faults: FaultSettings = field(default_factory=FaultSettings)
    load: LoadSettings = field(default_factory=LoadSettings)
    offers: OfferLimits = field(default_factory=lambda: OfferLimits(max_retired=32))
    fetches: FetchLimits = field(default_factory=lambda: FetchLimits(max_retired=32))
    meetings: MeetingLimits = field(default_factory=lambda: MeetingLimits(max_retired=32))
    slots: SlotLimits = field(default_factory=lambda: SlotLimits(max_gathers=2, max_retired=32))
    reads: ReadLimits = field(default_factory=lambda: ReadLimits(legs_in_flight=3, max_retired=32))
    max_replies: int = 4096
    late_read_s: float = 30.0

    def lossy(self, loss: float) -> "Settings":
        """The same world, in which this share of all messages is lost."""
        return replace(self, network=replace(self.network, loss=loss))


CALM = Settings(
    agents=2,
    network=NetworkSettings(duplicates=0.0, slow=0.0),
    faults=FaultSettings(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
)
"""Nothing goes wrong but what the engines themselves do."""

CROWDED = Settings(
    agents=2,
    network=NetworkSettings(loss=0.02, duplicates=0.02, slow=0.05, slow_s=0.5),
    faults=FaultSettings(3.0, 4.0, 20.0, 30.0, 1e-3, 0.02, 0.02, 0.01),
    load=LoadSettings(
        offers_per_s=40.0,
        blocks=48,
        second_readers=0.2,
        withdrawn=0.05,
        cancelled=0.1,
        impatient=0.2,
        altered=0.02,
        compared=0.3,
        offer_ttl_s=3.0,
        fetch_timeout_s=10.0,
    ),
    offers=OfferLimits(max_offers=12, max_retired=4, max_lease_s=1.0, max_hold_s=3.0),
    fetches=FetchLimits(
        max_fetches=8,
        num_places=2,
        patience_s=0.2,
        max_retired=4,
        lease_s=1.0,
        request_timeout_s=1.0,
    ),
    meetings=MeetingLimits(max_names=6, max_waiting=2, max_wait_s=0.5, max_retired=4),
    slots=SlotLimits(num_slots=2, max_waiting=4, max_slot_lease_s=0.5, max_retired=2, wipe=True),
    reads=ReadLimits(legs_in_flight=2, num_slots=2, quarantine_s=1.5, max_retired=2),
    max_replies=64,
    late_read_s=1.0,
)
"""Two agents on each side with too little of everything, in a bad network."""

SLUGGISH = replace(
    CROWDED,
    network=NetworkSettings(loss=0.2, duplicates=0.1, delay_s=0.05, slow=0.3, slow_s=1.5),
    faults=FaultSettings(4.0, 8.0, 30.0, 60.0, 1e-3, 0.05, 0.1, 0.01),
    load=replace(CROWDED.load, offers_per_s=6.0),
)
"""Messages take as long as leases last, a fifth is lost, processes stop for longer than that."""

WORLDS = {"plain": Settings(), "calm": CALM, "crowded": CROWDED, "sluggish": SLUGGISH}
