"""Gives a transport altered metadata of a peer, and then reads from that peer.

What is altered is what NIXL wrote, not what UCX did.
"""

import sys
from concurrent.futures import Future
from random import Random

import numpy as np

from kvbus.errors import RemoteError
from kvbus.transport import PeerMetadata, ReadOutcome, ReadStatus, Transport

NAME = "peer/0000"
NUM_BYTES = 4096
KEY_BYTES = 11


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
    made: bytes = renamed[:start] + put + renamed[start + length :]
    return made


random, memory, landed = (
    Random(1),
    np.arange(NUM_BYTES, dtype=np.uint8),
    np.zeros(NUM_BYTES, np.uint8),
)
peer, reader = Transport(NAME), Transport("reader/1")
for transport, own in ((peer, memory), (reader, landed)):
    transport.start().result(20)
    transport.register(own.ctypes.data, NUM_BYTES).result(20)
blob = peer.metadata().result(20)
num_refused = 0
for number in range(1, int(sys.argv[1]) + 1):
    try:
        reader.add_peer(altered(blob, number, random)).result(20)
    except RemoteError:
        num_refused += 1
print("refused" if num_refused else "taken")

reader.add_peer(blob).result(20)
ours, theirs = (np.array([(own.ctypes.data, NUM_BYTES, 0)], np.uint64) for own in (landed, memory))
with peer.hold_progress():
    ended: Future[ReadOutcome] = Future()
    reader.read(PeerMetadata.read(blob).name, ours, theirs, on_end=ended.set_result)
    read = ended.result(20).status is ReadStatus.DONE and bool((landed == memory).all())
print("read" if read else "lost")
for transport in (peer, reader):
    transport.close(timeout_s=2).result(20)
