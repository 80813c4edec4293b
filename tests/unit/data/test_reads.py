"""READs between two data processes: what arrives, in which turn, and what an abort leaves."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode, LocalError, PeerLost, TransferFailed
from tests.support.data_process import MIB, Data, add_plan, moves
from tests.unit.data.conftest import MakeMemory, MakePair, Start, opened


@pytest.mark.parametrize("tls", ["all", "tcp"])
@pytest.mark.parametrize("slice_bytes", [64 << 10, 5056], ids=["many in one", "one in many"])
def test_scattered_blocks_land_in_their_places_and_nowhere_else(
    make_pair: MakePair, tls: str, slice_bytes: int
) -> None:
    pair = make_pair(1 << 14, 64, tls=tls, slice_bytes=slice_bytes)
    rng = np.random.default_rng(2)
    source, target = (rng.permutation(1 << 14)[:5000].tolist() for _ in range(2))
    expected = np.zeros_like(pair.ours.blocks)
    expected[target] = pair.theirs.blocks[source]

    reply = pair.reader.do(wire.Read(plan=1, **moves(source, target)))

    assert reply.error is None
    assert reply.num_bytes == 5000 * 64
    assert np.array_equal(pair.ours.blocks, expected)


@pytest.mark.parametrize(
    ("blocks", "priority"), [(range(1), 0), (range(1024), 1)], ids=["small", "urgent"]
)
def test_a_read_that_is_small_or_urgent_overtakes_a_large_one(
    make_pair: MakePair, blocks: Sequence[int], priority: int
) -> None:
    """Whose turn it is otherwise is shown in `tests/unit/table/test_fair.py`."""
    pair = make_pair(2048, 32 << 10, slice_bytes=256 << 10)
    reader = pair.reader
    assert pair.can_read()

    reader.stop()
    large = reader.read(1, range(1024, 2048), range(1024, 2048))
    other = reader.read(1, blocks, blocks, priority=priority)
    reader.go_on()
    reader.wait(other)

    assert large not in reader.replies
    assert reader.result(large) is None


@pytest.mark.parametrize("tls", ["all", "tcp"])
def test_connected_reads_over_shared_memory_end_undriven(make_pair: MakePair, tls: str) -> None:
    pair = make_pair(tls=tls)
    reader = pair.reader

    replies = [reader.wait(reader.read(1, [at], [at])) for at in range(3)]

    assert not any(reply.error for reply in replies)
    assert [reply.undriven for reply in replies] == [False, *[tls == "all"] * 2]


def test_a_read_of_memory_that_was_not_registered_fails_alone(make_pair: MakePair) -> None:
    pair = make_pair()
    pair.reader.call(pair.held.remote(7, offset_bytes=1 << 40))
    pair.reader.call(add_plan(7, 7, 1))

    with pytest.raises(TransferFailed) as failed:
        pair.reader.result(pair.reader.read(7, [0], [0]))

    assert failed.value.detail["nixl"] == "nixlNotFoundError"
    assert pair.can_read()


def test_memory_is_readable_once_metadata_is_added_and_readded(
    make_pair: MakePair, memory: MakeMemory
) -> None:
    pair = make_pair()
    reader, holder = pair.reader, pair.holder
    later = holder.hold(2, memory(256, 16 << 10, seed=2))
    reader.call(later.remote(2))
    reader.call(add_plan(2, 2, 1))

    early = reader.wait(reader.read(2, [1], [1]))
    reader.call(wire.AddPeer(peer="holder", metadata=later.metadata))
    reader.result(reader.read(2, [1], [1]))
    reader.call(wire.RemovePeer(peer="holder"))
    removed = reader.wait(reader.read(2, [1], [1]))
    both = holder.metadata(1, 2)
    reader.call(wire.AddPeer(peer="holder", metadata=both))

    assert early.error
    assert early.error.code is ErrorCode.TRANSFER_FAILED
    assert np.array_equal(pair.ours.blocks[1], later.flat.blocks[1])
    assert removed.error
    assert removed.error.code is ErrorCode.PEER_LOST
    assert pair.can_read()


def test_metadata_may_be_added_while_a_read_is_in_flight(
    make_pair: MakePair, memory: MakeMemory
) -> None:
    pair = make_pair(128, MIB, tls="tcp")
    later = pair.holder.hold(2, memory(16, MIB, seed=2))
    assert pair.can_read()

    pair.holder.stop()
    number = pair.read_all()
    pair.reader.meet(later, 2, 1)
    in_flight = not pair.reader.has_ended(number)
    pair.holder.go_on()
    pair.reader.result(number)
    arrived = np.array_equal(pair.ours.content, pair.theirs.content)
    pair.reader.result(pair.reader.read(2, [3], [3]))

    assert in_flight
    assert arrived
    assert np.array_equal(pair.ours.blocks[3], later.flat.blocks[3])


def test_memory_mapped_before_nixl_opens_is_registered_then(
    start: Start, memory: MakeMemory
) -> None:
    holder, reader = opened(start("holder")), start("reader")
    theirs, ours = memory(4, 4096, seed=1), memory(4, 4096)
    held = holder.hold(1, theirs)
    reader.add(1, ours)

    with pytest.raises(LocalError, match="nixl is not defined"):
        reader.call(wire.AddPeer(peer="holder", metadata=held.metadata))
    reader.call(wire.OpenNixl())
    reader.meet(held, 1, 1)
    reader.result(reader.read(1, [2], [0]))

    assert np.array_equal(ours.blocks[0], theirs.blocks[2])


def test_peer_name_unlike_its_metadata_is_refused(
    make_pair: MakePair,
) -> None:
    pair = make_pair()
    add = wire.AddPeer(peer="other", metadata=pair.held.metadata)

    with pytest.raises(LocalError, match="'holder' came as that of 'other'"):
        pair.reader.call(add)

    assert pair.can_read()


def test_read_unpostable_by_ucx_names_settings_of_environment(
    make_pair: MakePair,
) -> None:
    pair = make_pair(env={"UCX_PROTO_ENABLE": "n"})

    with pytest.raises((TransferFailed, PeerLost)) as failed:
        pair.reader.result(pair.reader.read(1, [0], [0]))

    assert "UCX_PROTO_ENABLE=n" in failed.value.message


def test_read_of_many_runs_arrives_and_one_outside_tables_fails(
    make_pair: MakePair,
) -> None:
    pair = make_pair(1 << 14, 64)
    even = range(0, 1 << 14, 2)

    pair.reader.result(pair.reader.read(1, even, even))
    lacking = {**moves([0, 1], [0, 1]), "spans": {"flat": (0, 3)}}
    reply = pair.reader.do(wire.Read(plan=1, **lacking))

    assert np.array_equal(pair.ours.blocks[::2], pair.theirs.blocks[::2])
    assert not pair.ours.blocks[1::2].any()
    assert reply.error
    assert reply.error.code is ErrorCode.GEOMETRY


def test_opened_nixl_has_tcp_sockets_on_its_interfaces_alone(
    start: Start,
) -> None:
    data: Data = start()
    before = data.call(wire.ListListening()).sockets
    data.call(wire.OpenNixl())
    after = data.call(wire.ListListening()).sockets

    assert before == ()
    assert {host for host, _ in after} == {"127.0.0.1"}
