"""Kinds of worlds: shapes, networks, and how often faults happen; and runs of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.sim.cluster import Cluster, D, Fault, FaultKind, P, Settings, cluster_of
from tests.sim.engine import Shape
from tests.sim.handoffs import Plan
from tests.sim.world import Luck

LEASE_S, QUARANTINE_S = 3.0, 20.0
LEAST_COMPLETED = 5
SHORT: dict[str, Any] = {"heartbeat_s": 2.0, "drain_timeout_s": 5.0}
PREFILL = {**SHORT, "max_lease_s": 10.0, "late_read_s": 5.0}
LEASES = {"lease_s": LEASE_S, "quarantine_timeout_s": QUARANTINE_S}
DECODE = {**SHORT, **LEASES, "request_timeout_s": 2.0}
HND = Shape(tp=4, block_size=6, layout="block,kv,head,token,dim")
"""Fewer heads than ranks, so that each tile is copied to two of them."""


@dataclass(frozen=True, kw_only=True)
class Sort:
    """A kind of world; ``fault_every_s`` is the mean time between faults, 0 for none."""

    settings: Settings
    request_every_s: float = 0.008
    most_live: int = 40
    fault_every_s: float = 0.0
    kinds: tuple[FaultKind, ...] = tuple(FaultKind)
    lasts_s: float = 2.0
    grows: float = 0.0
    gap_s: float = 0.01
    meets: float = 0.0
    withdrawn: float = 0.0
    parked: float = 0.0
    cancelled: float = 0.0
    unread: float = 0.0
    hits: float = 0.0
    num_tokens: int = 24


def quick(
    prefill_config: Mapping[str, Any] | None = None,
    decode_config: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Settings:
    """Settings with short deadlines."""
    return Settings(
        prefill_config={**PREFILL, **(prefill_config or {})},
        decode_config={**DECODE, **(decode_config or {})},
        **settings,
    )


def cells(**settings: Any) -> Settings:
    """Agents of one machine, which commit offers by their cells."""
    mapped = {"mapped": True}
    return quick(mapped, mapped, pairs=2, **settings)


def pools(*, park_bytes: int = 16 << 10, park_after_s: float = 3600.0, **settings: Any) -> Settings:
    """Prefill agents with a pool of about half an engine's cache."""
    return quick({"park_bytes": park_bytes, "park_after_s": park_after_s}, **settings)


RESTLESS: dict[str, Any] = {
    "grows": 0.3, "meets": 0.2, "withdrawn": 0.05, "cancelled": 0.05, "unread": 0.02, "hits": 0.2,
}  # fmt: skip
WITHDRAWN: dict[str, Any] = {**RESTLESS, "grows": 0.1, "withdrawn": 0.3}
LOSSY: dict[str, Any] = {"breaks": 0.002, "drops": 0.02, "delay_s": 1e-3}

DATA = (
    FaultKind.CRASH_DATA,
    FaultKind.CRASH_DATA_AGAIN,
    FaultKind.FREEZE_DATA,
    FaultKind.RESET,
    FaultKind.CRASH_AGENT,
)

SORTS: dict[str, Sort] = {
    "plain": Sort(settings=quick()),
    "lossy": Sort(settings=quick(pairs=2, **LOSSY), fault_every_s=0.5, **RESTLESS),
    "packed": Sort(
        settings=quick(pairs=2, decode=HND, breaks=0.001),
        fault_every_s=0.5,
        request_every_s=0.01,
        **RESTLESS,
    ),
    "compared": Sort(
        settings=quick(
            pairs=2, decode=HND, decode_config={"digest": "full", "path": "staged"}, flips=0.02
        ),
        fault_every_s=1.0,
        request_every_s=0.01,
        **RESTLESS,
    ),
    "cells": Sort(settings=cells(), fault_every_s=0.5, **WITHDRAWN),
    "slow cells": Sort(settings=cells(decode=HND, thread_s=2e-3), fault_every_s=0.3, **WITHDRAWN),
    "crashes": Sort(
        settings=quick(pairs=2, delay_s=1e-3, part_s=5e-3),
        fault_every_s=0.7,
        kinds=(FaultKind.CRASH_AGENT, FaultKind.CRASH_ENGINE, FaultKind.DRAIN_AGENT),
        **RESTLESS,
    ),
    "data": Sort(
        settings=quick(pairs=2, prefill=HND, part_s=2e-3, thread_s=1e-3, dies=2e-4),
        fault_every_s=0.7,
        kinds=DATA,
        gap_s=0.1,
        **{**RESTLESS, "grows": 0.7},
    ),
    "packed data": Sort(
        settings=quick(pairs=2, decode=HND, decode_config={"path": "packed"}, dies=1e-4),
        fault_every_s=0.7,
        kinds=(*DATA, FaultKind.LEAVE, FaultKind.CRASH_ENGINE),
        request_every_s=0.01,
        **RESTLESS,
    ),
    "parked": Sort(
        settings=pools(park_after_s=0.002, pairs=2, thread_s=1e-3, dies=1e-4),
        fault_every_s=0.7,
        **{**RESTLESS, "grows": 0.5, "parked": 0.3, "withdrawn": 0.1},
    ),
    "frozen": Sort(
        settings=quick(pairs=2, delay_s=1e-3, part_s=20e-3),
        fault_every_s=1.5,
        kinds=(
            FaultKind.FREEZE_AGENT,
            FaultKind.FREEZE_CONTROL,
            FaultKind.FREEZE_DATA,
            FaultKind.FREEZE_ENGINE,
            FaultKind.CUT,
            FaultKind.LEAVE,
        ),
        lasts_s=8.0,
        **RESTLESS,
    ),
}


def simulate(sort: Sort, *, seed: int, num_handoffs: int) -> Cluster:
    """Run a world with so many handoffs. Raises `Violation`."""
    with cluster_of(sort.settings, seed) as cluster:
        world, ledger = cluster.world, cluster.ledger

        def is_going_on() -> bool:
            """Whether to go on, for longer in a world with few complete handoffs."""
            is_idle = ledger.ends["completed"] <= LEAST_COMPLETED
            return ledger.num_started < (3 if is_idle else 1) * num_handoffs

        def ask_on() -> None:
            if is_going_on():
                if len(ledger.live) < sort.most_live:
                    cluster.give(plan(sort, world.luck, ledger.num_started))
                world.after(world.luck.delay_s(sort.request_every_s), ask_on)

        def go_wrong() -> None:
            if sort.fault_every_s and is_going_on():
                cluster.suffer(fault(sort, world.luck))
                world.after(world.luck.delay_s(sort.fault_every_s), go_wrong)

        ask_on()
        go_wrong()
        cluster.until(lambda: not is_going_on(), within_s=1e9)
    return cluster


def fault(sort: Sort, luck: Luck) -> Fault:
    return Fault(
        luck.choice(sort.kinds),
        role=luck.choice((P, D)),
        number=luck.randrange(sort.settings.pairs),
        other=luck.randrange(sort.settings.pairs),
        lasts_s=luck.delay_s(sort.lasts_s),
    )


def plan(sort: Sort, luck: Luck, number: int) -> Plan:
    num_tokens = 1 + luck.randrange(sort.num_tokens)
    grows, meets = luck.chance(sort.grows), luck.chance(sort.meets)
    return Plan(
        prefill=luck.randrange(sort.settings.pairs),
        decode=luck.randrange(sort.settings.pairs),
        num_tokens=num_tokens,
        first_token=luck.randrange(num_tokens + 1) if luck.chance(sort.hits) else 0,
        num_pieces=1 + luck.randrange(4) if grows else 1,
        gap_s=luck.delay_s(sort.gap_s),
        fetch_after_s=None if luck.chance(sort.unread) else luck.delay_s(0.005),
        meets=meets,
        transfer_id=f"transfer-of-{number:06}" if meets else None,
        timeout_s=luck.choice((2.0, 10.0, 30.0)),
        ttl_s=luck.choice((3.0, 20.0)),
        chunk_tokens=luck.choice((0, 0, 4, 8)),
        priority=luck.randrange(3),
        withdraw_after_s=luck.delay_s(0.01) if luck.chance(sort.withdrawn) else None,
        cancel_after_s=luck.delay_s(0.01) if luck.chance(sort.cancelled) else None,
        gives_up_offer=luck.chance(0.5),
        park_after_s=luck.delay_s(0.005) if luck.chance(sort.parked) else None,
    )
