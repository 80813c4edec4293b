"""Checks of peers' NIXL metadata.

NIXL trusts lengths that lead out of the blob, and unknown kinds of memory. UCX aborts on an address
of an unknown version.
"""

from kvbus.data.nixl import PeerMetadata
from kvbus.errors import TransferFailed

_START = b"nixlSerDes|"
_LENGTH_BYTES = 8
_MOST_CONNECTIONS = 8
_MOST_NAME_BYTES = 256
_MOST_SECTIONS = 64
_DESCRIPTOR_BYTES = 24  # address, length, device; the rest is UCX's
_KINDS = tuple(kind.to_bytes(4, "little") for kind in (0, 1))  # DRAM and VRAM
_UCX_VERSION_BITS = 0x0F
_LAST_UCX_VERSION = 1  # UCP_OBJECT_VERSION_V2


def read_metadata(blob: bytes) -> PeerMetadata:
    """Raises `TransferFailed` if NIXL must not get the blob."""
    fields = _Fields(blob)
    name = fields.take(b"Agent")
    if len(name) > _MOST_NAME_BYTES or not name.isascii() or not name.decode().isprintable():
        raise _refusal("its name is not printable ASCII")
    for _ in range(fields.count(b"Conns", 1, _MOST_CONNECTIONS)):
        _check_address(fields.take(b"t"), fields.take(b"c"))
    contact = blob[: fields.at]
    fields.expect(b"", b"MemSection")
    for _ in range(fields.count(b"nixlSecElms", 0, _MOST_SECTIONS)):
        _check_section(fields)
    fields.check_end()
    return PeerMetadata(name.decode(), contact, blob)


# NIXL writes fields in sequence: a tag, a length of 8 bytes, the content, and a bar. The parser
# must know the tags, as they have no length:
#
#     nixlSerDes|  Agent NAME|  Conns COUNT|  (t BACKEND|  c ADDRESS|)...      the contact
#     MemSection|  nixlSecElms COUNT|  (section)...                            the memory
#
#     a section:   bknd BACKEND|  nixlDList nixlSDList|  t KIND|  n COUNT|  (DESCRIPTOR|)...
class _Fields:
    def __init__(self, blob: bytes) -> None:
        self._blob = blob
        self.at = len(_START)
        if not blob.startswith(_START):
            raise _refusal("it is not of NIXL")

    def take(self, tag: bytes) -> bytes:
        blob, start = self._blob, self.at + len(tag) + _LENGTH_BYTES
        stop = start + int.from_bytes(blob[start - _LENGTH_BYTES : start], "little")
        if not blob.startswith(tag, self.at) or blob[stop : stop + 1] != b"|":
            raise _refusal(f"no field '{tag.decode()}' at byte {self.at}")
        self.at = stop + 1
        return blob[start:stop]

    def expect(self, tag: bytes, *contents: bytes) -> None:
        if self.take(tag) not in contents:
            raise _refusal(f"another '{tag.decode()}' than {contents[0]!r}")

    def count(self, tag: bytes, least: int, most: int) -> int:
        content = self.take(tag)
        number = int.from_bytes(content, "little")
        if len(content) != _LENGTH_BYTES or not least <= number <= most:
            raise _refusal(f"'{tag.decode()}' is {number}")
        return number

    def check_end(self) -> None:
        if self.at != len(self._blob):
            raise _refusal(f"{len(self._blob) - self.at} bytes are left over")


def _check_address(backend: bytes, address: bytes) -> None:
    version = address[0] & _UCX_VERSION_BITS if address else None
    if backend != b"UCX" or version is None or version > _LAST_UCX_VERSION:
        raise _refusal(f"backend {backend[:16]!r} with an address of version {version}")


def _check_section(fields: _Fields) -> None:
    fields.expect(b"bknd", b"UCX")
    fields.expect(b"nixlDList", b"nixlSDList")
    fields.expect(b"t", *_KINDS)
    for _ in range(fields.count(b"n", 0, 1 << 20)):  # each must exist, or its field is rejected
        if len(fields.take(b"")) < _DESCRIPTOR_BYTES:
            raise _refusal("a descriptor is too short")


def _refusal(why: str) -> TransferFailed:
    return TransferFailed(f"the peer's metadata is refused: {why}")
