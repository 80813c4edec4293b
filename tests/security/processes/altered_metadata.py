"""Gives a transport altered metadata of a peer, and then reads from that peer.

Prints what becomes of each named lie, of so many random ones, and of the read in the end. What is
altered at random is what NIXL wrote, not what UCX did.
"""

import sys
from collections.abc import Callable
from concurrent.futures import Future
from random import Random

import numpy as np

from kvbus.errors import RemoteError
from kvbus.transport import PeerMetadata, ReadOutcome, ReadStatus, Transport

NAME = "peer/0000"
NUM_BYTES = 4096
KEY_BYTES = 11
HUGE = ((1 << 63) - 1).to_bytes(8, "little")
KIND = b"nixlSDList|t\x04\0\0\0\0\0\0\0"
ADDRESS = b"|t\x03\0\0\0\0\0\0\0UCX|c"


def named(blob: bytes, name: bytes) -> bytes:
    """The blob of an agent of another name."""
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


def altered(blob: bytes, number: int, random: Random) -> bytes:
    """Under a name of its own, so that NIXL does not compare it with what it has."""
    renamed = blob.replace(NAME.encode(), f"peer/{number:04}".encode())
    address = renamed.index(b"|c") + 10
    end = address + int.from_bytes(renamed[address - 8 : address], "little")
    key = len(renamed) - 1 - KEY_BYTES
    start = random.choice([*range(address), *range(end, key)])
    limit = address if start < address else key
    length = min(random.randrange(1, 9), limit - start)
    put: bytes = random.choice([random.randbytes(length), b"\xff" * length, b"", b"\0" * length])
    return bytes(renamed[:start] + put + renamed[start + length :])


def code_of(lie: bytes) -> str:
    try:
        reader.add_peer(lie).result(20)
    except RemoteError as error:
        return error.code.value
    return "taken"


random = Random(1)
memory, landed = np.arange(NUM_BYTES, dtype=np.uint8), np.zeros(NUM_BYTES, np.uint8)
peer, reader, liar = Transport(NAME), Transport("reader/1"), Transport("liar/0000")
for transport, own in ((peer, memory), (reader, landed), (liar, memory)):
    transport.start().result(20)
    transport.register(own.ctypes.data, NUM_BYTES).result(20)
blob = peer.metadata().result(20)
places = blob.index(ADDRESS) + len(ADDRESS) + 8, blob.index(KIND) + len(KIND)
for why, lie in LIES.items():
    print(f"{why}: {code_of(lie(blob, *places))}")
codes = {code_of(altered(blob, number, random)) for number in range(1, int(sys.argv[1]) + 1)}
reader.add_peer(blob).result(20)
print(f"the name of another: {code_of(named(liar.metadata().result(20), NAME.encode()))}")
print("random:", "refused" if codes - {"taken"} else "taken")

ours, theirs = (np.array([(own.ctypes.data, NUM_BYTES, 0)], np.uint64) for own in (landed, memory))
with peer.hold_progress():
    ended: Future[ReadOutcome] = Future()
    reader.read(PeerMetadata.read(blob).name, ours, theirs, on_end=ended.set_result)
    read = ended.result(20).status is ReadStatus.DONE and bool((landed == memory).all())
print("read" if read else "lost")
for transport in (peer, reader, liar):
    transport.close(timeout_s=2).result(20)
