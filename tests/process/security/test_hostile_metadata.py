"""Forged NIXL metadata is refused, and reads of other agents continue.

Each of these crashed the agent, was logged as a defect, or made NIXL remove another peer. Random
changes spare the bytes of UCX.
"""

from collections.abc import Callable
from random import Random

import numpy as np

from kvbus.data import messages as wire
from kvbus.errors import ErrorCode
from tests.support.data_process import Data, FlatMemory
from tests.support.examples import num_examples

NAME = "peer/0000"
NUM_BLOCKS, BLOCK_BYTES = 4, 4096
KEY_BYTES = 11
HUGE = ((1 << 63) - 1).to_bytes(8, "little")
KIND = b"nixlSDList|t\x04\0\0\0\0\0\0\0"
ADDRESS = b"|t\x03\0\0\0\0\0\0\0UCX|c"


def named(blob: bytes, name: bytes) -> bytes:
    start = blob.index(b"Agent") + 5
    return blob[:start] + len(name).to_bytes(8, "little") + name + blob[start + 8 + len(NAME) :]


def with_bytes(blob: bytes, at: int, put: bytes) -> bytes:
    return blob[:at] + put + blob[at + len(put) :]


LIES: dict[str, Callable[[bytes, int, int], bytes]] = {
    "a name that is no text": lambda blob, *_: named(blob, b"prefill/\xff"),
    "a name with an end in it": lambda blob, *_: named(blob, b"prefill\0x"),
    "an address of an unknown version": lambda blob, at, _: with_bytes(blob, at, b"\x2b"),
    "an address that leads out": lambda blob, at, _: with_bytes(blob, at - 8, HUGE),
    "an unknown kind of memory": lambda blob, _, at: with_bytes(blob, at, b"\x00\xf2\x00\x00"),
    "more descriptors than there are": lambda blob, _, at: with_bytes(blob, at + 14, HUGE),
    "half of it": lambda blob, *_: blob[: len(blob) // 2],
    "nothing": lambda *_: b"",
}


def changed(blob: bytes, random: Random) -> bytes:
    renamed = blob.replace(NAME.encode(), b"peer/0001")
    address = renamed.index(b"|c") + 10
    end = address + int.from_bytes(renamed[address - 8 : address], "little")
    key = len(renamed) - 1 - KEY_BYTES
    start = random.choice([*range(address), *range(end, key)])
    limit = address if start < address else key
    length = min(random.randrange(1, 9), limit - start)
    put: bytes = random.choice([random.randbytes(length), b"\xff" * length, b"", b"\0" * length])
    return bytes(renamed[:start] + put + renamed[start + length :])


def test_altered_metadata_is_refused_and_victim_is_still_read() -> None:
    """The data process would end, too, if NIXL or UCX got some of it."""
    reader, peer, liar = (Data(name) for name in ("reader/1", NAME, "liar/0000"))
    theirs, ours = (FlatMemory.of(NUM_BLOCKS, BLOCK_BYTES, seed=seed) for seed in (1, None))
    try:
        for data in (reader, peer, liar):
            data.call(wire.OpenNixl())
        peer.call(wire.DriveProgress(on=True))
        held, lie = peer.hold(1, theirs), liar.hold(1, theirs)
        reader.add(1, ours)
        (blob,) = held.metadata
        places = blob.index(ADDRESS) + len(ADDRESS) + 8, blob.index(KIND) + len(KIND)
        lies = {why: change(blob, *places) for why, change in LIES.items()}
        codes = {why: code_of(reader, NAME, altered) for why, altered in lies.items()}
        random, name = Random(1), "peer/0001"
        found = {code_of(reader, name, changed(blob, random)) for _ in range(num_examples(2000))}
        reader.meet(held, 1, 1)
        stolen = code_of(reader, NAME, named(lie.metadata[0], NAME.encode()))
        reader.result(reader.read(1, range(NUM_BLOCKS), range(NUM_BLOCKS)))
        is_read = np.array_equal(ours.content, theirs.content)
    finally:
        for data in (reader, peer, liar):
            data.end()
        for flat in (theirs, ours):
            flat.segment.close()
    assert set(codes.values()) == {ErrorCode.TRANSFER_FAILED}, codes
    assert stolen is ErrorCode.TRANSFER_FAILED
    assert ErrorCode.TRANSFER_FAILED in found
    assert found <= {None, ErrorCode.TRANSFER_FAILED, ErrorCode.INVALID}
    assert is_read


def code_of(reader: Data, name: str, blob: bytes) -> ErrorCode | None:
    error = reader.do(wire.AddPeer(peer=name, metadata=(blob,))).error
    if error is None:
        reader.call(wire.RemovePeer(peer=name))
    return None if error is None else error.code
