"""One example of each message, with every field set: what the golden vectors are made of.

Refuses random values and clocks: the same bytes come out on every machine.
"""

from typing import Any, TypeVar

import msgspec

from kvbus import protocol as p
from kvbus.geometry import (
    Axis,
    AxisName,
    BlockTable,
    Box,
    EngineSpec,
    GroupSpec,
    KvPart,
    RankSpec,
    Region,
    Segment,
    SlotOrder,
    StatePart,
    state_group,
)
from kvbus.protocol import Empty, Message, PeerView, Ticket, TicketKeys, packed_tables

PREFILL_BOOT = "0f8fad5bd9cb469fa16570867728950e"
DECODE_BOOT = "7c9e6679742540de944be07fc1f90ae7"
ENGINE_BOOT = "16fd2706e8baf433b821a2a3d6a4c1d5"
INSTANCE = "4f9d2f1c7b6e4a0f9a3c5e8d7b1a2c3d"
SECRET = "b1946ac92492d2347c6235b4d2611184"
TOKEN = "591785b794601e212b260e25925636fd"
TRANSFER_ID = "e1671797c52e15f763380b45e841ec32"
ACCESS = "d41d8cd98f00b204e9800998ecf8427e"
SERVER_KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
MEMORY_ID = "5d41402abc4b2a76b9719d911017c592"
PREFILL_ENDPOINT = "tcp://10.0.0.1:7501"
OTHER_ENDPOINT = "tcp://10.0.0.2:7501"
EVENTS_ENDPOINT = "tcp://10.0.0.1:7502"

PARTS = (KvPart.KEY, KvPart.VALUE)
SPEC = EngineSpec(
    engine_id="prefill-0",
    model="example/model@main",
    tp_size=1,
    groups=(GroupSpec("full", (0, 1), 16, 2, 64, "bfloat16", PARTS, None),),
)
WINDOWED = EngineSpec(
    engine_id="decode-0",
    model="example/model@main",
    tp_size=1,
    groups=(
        GroupSpec("latent", (0,), 32, 1, 512, "float16", (KvPart.LATENT,), 4096),
        state_group("state", (1,), (StatePart("conv", 8, 96), StatePart("norm", 1, 12))),
    ),
    pp_size=2,
)
AXES = (
    Axis(AxisName.BLOCK, 128, 16_384),
    Axis(AxisName.LAYER, 2, 8_192),
    Axis(AxisName.KV, 2, 4_096),
    Axis(AxisName.TOKEN, 16, 256),
    Axis(AxisName.HEAD, 2, 128),
    Axis(AxisName.DIM, 64, 2),
)
RANK = RankSpec(
    rank=0,
    segments=(Segment("kv", 128 * 16_384),),
    regions=(Region("kv", 0, "full", (0, 1), PARTS, 0, 2, AXES),),
)
TABLES = {"full": BlockTable.of([7, 300, 70_000], first_block=0)}
BY_BLOCK = SlotOrder(
    (AxisName.LAYER, AxisName.KV, AxisName.BLOCK, AxisName.HEAD, AxisName.TOKEN, AxisName.DIM), 16
)
NEW_TABLES = {"full": BlockTable.of([9], first_block=3)}
DIGEST = "0cc175b9c0f1b6a831c399e269772661"
KEYS = TicketKeys([b"an example of a key, of 32 bytes."])
UNSIGNED = Ticket(
    agent_id="prefill-agent-0",
    agent_boot=PREFILL_BOOT,
    endpoint=PREFILL_ENDPOINT,
    engine_id="prefill-0",
    engine_instance=INSTANCE,
    offer_id="offer-1",
    request_id="request-1",
    num_tokens=40,
    secret=SECRET,
    server_key=SERVER_KEY,
    audience="decode-0",
    prompt_digest=DIGEST,
    blocks=packed_tables(TABLES, max_blocks=3),
)
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
TICKET = KEYS.sign(UNSIGNED, now_s=1_760_000_000, lifetime_s=3600).to_json()
MEMORY = p.EngineMemory(engine=SPEC, ranks=(RANK,), addresses=({"kv": 0x7F00_0000_0000},))
OTHERS = (p.AgentRanks(OTHER_ENDPOINT, (1,), ACCESS, SERVER_KEY),)
GRANTED = p.Granted(epoch=1, lease_s=10.0, num_tokens=40, sealed=True, tables=TABLES, token=TOKEN)

TWO = msgspec.structs.replace(SPEC, engine_id="prefill-1", tp_size=2)


def _half(rank: int) -> RankSpec:
    """One of two heads."""
    axes = (
        Axis(AxisName.BLOCK, 128, 8_192),
        Axis(AxisName.LAYER, 2, 4_096),
        Axis(AxisName.KV, 2, 2_048),
        Axis(AxisName.TOKEN, 16, 128),
        Axis(AxisName.DIM, 64, 2),
    )
    region = Region("kv", 0, "full", (0, 1), PARTS, rank, 1, axes)
    return RankSpec(rank=rank, segments=(Segment("kv", 128 * 8_192),), regions=(region,))


TWO_RANKS = {
    "6f1ed002ab5595859014ebf0951522d9": p.Register(engine=TWO, role=p.AgentRole.PREFILL),
    "25b0a9d4e1c94d6f8a3b7c2d5e6f7081": p.Register(engine=TWO, rank=_half(0)),
    "a87ff679a2f3e71d9181a67b7542122c": p.Register(engine=TWO, rank=_half(1)),
}
"""By boot id: the control session and both ranks of one engine."""

COMMON: dict[str, Any] = {
    "access": ACCESS,
    "agent_boot": PREFILL_BOOT,
    "agent_id": "prefill-agent-0",
    "engine_id": "prefill-0",
    "epoch": 1,
    "fetch_id": "fetch-1",
    "lease_s": 10.0,
    "memory_id": MEMORY_ID,
    "num_tokens": 50,
    "offer_id": "offer-1",
    "one_in": 64,
    "path": "direct",
    "rank": 0,
    "request_id": "request-1",
    "secret": SECRET,
    "segment_id": "kv",
    "size_bytes": 128 * 16_384,
    "ticket": TICKET,
    "token": TOKEN,
}
"""Fields that mean the same in every message."""
M = TypeVar("M", bound=msgspec.Struct)


def example(kind: type[M], **own: Any) -> M:
    """A message of ``kind`` with each field set: to that of its own, or the common one."""
    common = {name: COMMON[name] for name in kind.__struct_fields__ if name in COMMON}
    return kind(**common | own)


ROOMS: dict[str, dict[type[Message], tuple[Message, Message]]] = {
    "attach": {
        p.Hello: (
            example(p.Hello, min_protocol=1, max_protocol=1, boot=ENGINE_BOOT),
            example(
                p.Welcome,
                protocol=1,
                role=p.AgentRole.PREFILL,
                engine_endpoint="ipc:///run/kvbus/prefill-agent-0.engine",
                peer_endpoint=PREFILL_ENDPOINT,
                events_endpoint=EVENTS_ENDPOINT,
                features=p.FEATURES,
                server_key=SERVER_KEY,
            ),
        ),
        p.PassSegment: (example(p.PassSegment, direct=True), p.SegmentPassed(sealed=True)),
        p.PassCuda: (
            example(
                p.PassCuda,
                device="GPU-8f7d1a52-0b3c-4e6d-9a1f-2c5b7e904d36",
                handle=bytes(range(64)),
                offset_bytes=512,
                event=bytes(range(64, 128)),
            ),
            Empty(),
        ),
    },
    "handover": {
        p.HandOver: (
            example(p.HandOver, role=p.AgentRole.PREFILL, agent_boot=DECODE_BOOT),
            example(p.HandedOver, peer_endpoint=PREFILL_ENDPOINT),
        ),
        p.TakenOver: (p.TakenOver(), Empty()),
    },
    "memory": {
        p.LendMemory: (
            example(p.LendMemory, first=0),
            example(p.MemoryLent, num_segments=1, segments=(example(p.LentSegment),)),
        )
    },
    "engine": {
        p.Register: (
            example(p.Register, engine=SPEC, rank=RANK, notices=True, role=p.AgentRole.PREFILL),
            Empty(),
        ),
        p.AwaitReady: (p.AwaitReady(), Empty()),
        p.Detach: (p.Detach(), Empty()),
        p.Acknowledge: (
            p.Acknowledge(upto=3, boot=PREFILL_BOOT, told_s=(81_234.5, 81_234.625)),
            Empty(),
        ),
        p.Ping: (p.Ping(), Empty()),
    },
    "prefill": {
        p.MakeOffer: (
            example(
                p.MakeOffer,
                num_tokens=40,
                tables=TABLES,
                sealed=False,
                ttl_s=30.0,
                audience="decode-0",
                prompt_digest=DIGEST,
                readers=2,
                traceparent=TRACE,
                asked_s=81_234.25,
            ),
            example(p.OfferMade),
        ),
        p.ExtendOffer: (example(p.ExtendOffer, tables=NEW_TABLES), Empty()),
        p.SealOffer: (example(p.SealOffer), Empty()),
        p.WithdrawOffer: (example(p.WithdrawOffer), Empty()),
    },
    "decode": {
        p.StartFetch: (
            example(
                p.StartFetch,
                num_tokens=40,
                tables={"full": BlockTable.of([5, 6], first_block=1)},
                first_token=20,
                timeout_s=2.5,
                zero_tail=True,
                chunk_tokens=16,
                prompt_digest=DIGEST,
                priority=-1,
                traceparent=TRACE,
                asked_s=81_234.25,
                wanted_s=81_230.0,
            ),
            Empty(),
        ),
        p.CancelFetch: (example(p.CancelFetch, release_offer=True), Empty()),
    },
    "peer": {
        p.Handshake: (
            example(
                p.Handshake,
                min_protocol=1,
                max_protocol=1,
                agent_id="decode-agent-0",
                reader=p.EngineMemory(engine=WINDOWED, ranks=(RANK,)),
                engine_instance=INSTANCE,
                ranks=(0,),
            ),
            example(
                p.HandshakeDone,
                protocol=1,
                memory=MEMORY,
                nixl_agent="prefill-agent-0",
                nixl_metadata=(b"\x00nixl\xff", b"\x01nixl\xfe"),
                events_endpoint=EVENTS_ENDPOINT,
                max_lease_s=30.0,
                slot_bytes=4 << 20,
                others=OTHERS,
                memory_socket=p.MemorySocket(
                    path="/run/kvbus/memory.sock", machine="5b7e2c1a-3f60-4d0e-9c55-0a1b2c3d4e5f"
                ),
            ),
        ),
        p.Claim: (
            example(p.Claim, reader_id="fetch-1", reader_agent="decode-0", reader_boot=DECODE_BOOT),
            GRANTED,
        ),
        p.Renew: (
            example(p.Renew, known_blocks={"full": 3}),
            example(p.Granted, sealed=True, tables=NEW_TABLES),
        ),
        p.Confirm: (example(p.Confirm), Empty()),
        p.Take: (example(p.Take, reader_id="fetch-1", tables=TABLES), Empty()),
        p.Release: (example(p.Release, code="cancelled"), Empty()),
        p.Meet: (p.Meet(transfer_id=TRANSFER_ID, wait_s=4.0), example(p.Met)),
        p.Forgo: (p.Forgo(transfer_id=TRANSFER_ID), Empty()),
        p.PeerWithdraw: (example(p.PeerWithdraw), Empty()),
        p.Pack: (
            example(
                p.Pack,
                box=Box("full", (0, 1), PARTS, first_head=1, num_heads=1, start=20, stop=40),
                order=BY_BLOCK,
                table=BlockTable.of([300, 70_000], first_block=1),
                slot_lease_s=10.0,
                done=(16, 17),
                priority=2,
            ),
            p.Packed(
                slot_id=18,
                address=0x7F00_4000_0000,
                num_bytes=16_384,
                slot_lease_s=10.0,
                memory="VRAM",
                device=1,
            ),
        ),
        p.Digest: (
            example(
                p.Digest,
                box=Box("full", (0, 1), PARTS, first_head=1, num_heads=1, start=20, stop=40),
                table=BlockTable.of([300, 70_000], first_block=1),
            ),
            p.Digests(digests=(0x0123_4567_89AB_CDEF).to_bytes(8, "little")),
        ),
        p.Unpack: (example(p.Unpack, slot_ids=(18,)), Empty()),
        p.CheckMemory: (example(p.CheckMemory, offer_id=""), Empty()),
        p.Delegate: (
            example(
                p.Delegate,
                engine_id="decode-0",
                ranks=(1,),
                memory_ids=("memory-0", "memory-1"),
                source=TABLES,
                target={"full": BlockTable.of([5, 6], first_block=1)},
                first_token=20,
                num_tokens=40,
                start=20,
                stop=32,
                last=False,
                zero_tail=True,
                timeout_s=2.5,
                priority=2,
            ),
            example(p.Delegated, num_bytes=6_144),
        ),
        p.AbortDelegate: (example(p.AbortDelegate), p.Aborted(ended=True)),
        p.Cost: (
            p.Cost(endpoint="tcp://10.0.0.7:7501", num_tokens=4096, first_token=64),
            example(
                p.Predicted,
                predicted_s=0.0125,
                queue_s=0.0025,
                num_bytes=67_108_864,
                decode_engine="decode-0",
                num_observed=12,
                observed_s_ago=1.5,
            ),
        ),
        p.Trace: (
            p.Trace(request_id="request-1"),
            p.Traced(
                agent_id="decode-agent-0",
                role=p.AgentRole.DECODE,
                boot="boot-1",
                now_s=812.25,
                wall_s=1_700_000_000.5,
                spans=(
                    p.Span(
                        name="fetch",
                        start_s=811.0,
                        end_s=811.5,
                        attributes={"fetch_id": "fetch-1", "num_bytes": 6_144},
                    ),
                    p.Span(name="claiming", start_s=811.0, end_s=811.25, depth=1),
                    p.Span(name="reading", start_s=811.25, end_s=811.5, depth=1),
                    p.Span(name="READ", start_s=811.25, depth=2, about="leg 0"),
                ),
                others=(p.OtherAgent(endpoint="tcp://10.0.0.1:7701"),),
            ),
        ),
        p.Status: (
            p.Status(echo="x", peer="tcp://10.0.0.9:7501", key=SERVER_KEY),
            example(
                p.AgentStatus,
                role=p.AgentRole.PREFILL,
                engines={"prefill-0": True},
                draining=False,
                counts={"offers": 2, "leases": 1},
                engine_instances={"prefill-0": "1d0c5f7e"},
                peer_endpoint="tcp://10.0.0.7:7501",
                events_endpoint="tcp://10.0.0.7:7502",
                echo="x",
                view=PeerView(
                    min_protocol=1, max_protocol=1, server_key=SERVER_KEY, roles=("decode",)
                ),
                sharing=p.Sharing(
                    machine="5b7e2c1a-3f60-4d0e-9c55-0a1b2c3d4e5f",
                    uid=1000,
                    mount_namespace="mnt:[4026531841]",
                    pid_namespace="pid:[4026531836]",
                    path="/run/kvbus/memory.sock",
                ),
            ),
        ),
    },
}

NOTICES: dict[type[Message], Message] = {
    p.Released: example(p.Released, outcome=p.Outcome.COMPLETED),
    p.Landed: example(p.Landed, num_tokens=512),
    p.Fetched: example(
        p.Fetched,
        outcome=p.Outcome.FAILED,
        stage="reading",
        blocks_free=False,
        code="timeout",
        message="the fetch did not end within its deadline, it was reading",
        num_bytes=65_536,
        stages_s=p.StageTimes(0.001, 0.002, 0.0, 2.497, 0.0),
    ),
    p.BlocksFreed: example(p.BlocksFreed),
    p.Replaced: p.Replaced(),
}

_OPENED = example(p.OfferEvent, num_tokens=40)
_LEASE = example(p.LeaseEvent)
_ENGINE = example(p.EngineEvent, engine_instance=INSTANCE)
EVENTS: dict[str, Message] = {
    "cost.changed": p.CostEvent(
        endpoint="tcp://10.0.0.7:7501",
        prefill_engine="prefill-0",
        decode_engine="decode-0",
        token_bytes=131_072,
        fixed_s=0.001,
        bytes_per_s=5e9,
    ),
    "heartbeat": p.Heartbeat(seqs={"offer.opened": 4, "lease.granted": 2}, uptime_s=12.5),
    "offer.opened": _OPENED,
    "offer.extended": example(p.OfferEvent),
    "offer.sealed": example(p.OfferEvent),
    "offer.released": example(p.OfferEvent, outcome="completed"),
    "lease.granted": _LEASE,
    "lease.revoked": _LEASE,
    "lease.expired": _LEASE,
    "lease.ended": _LEASE,
    "fetch.completed": example(p.FetchEvent),
    "fetch.failed": example(p.FetchEvent, code="timeout"),
    "fetch.cancelled": example(p.FetchEvent, code="cancelled"),
    "engine.ready": _ENGINE,
    "engine.lost": _ENGINE,
}
