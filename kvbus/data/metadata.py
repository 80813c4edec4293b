"""Checks of peers' NIXL metadata.

NIXL trusts lengths that lead out of the blob, and unknown kinds of memory. UCX aborts on an address
of an unknown version, and LIBFABRIC allocates any number of rails.
"""

from collections.abc import Callable

from kvbus.data.messages import UCX
from kvbus.data.nixl import PeerMetadata
from kvbus.errors import TransferFailed

_START = b"nixlSerDes|"
_LENGTH_BYTES = 8
_MOST_BACKEND_BYTES = 32
_MOST_NAME_BYTES = 256
_MOST_SECTIONS = 64
_DESCRIPTOR_BYTES = 24  # address, length, device; the rest is UCX's
_KINDS = tuple(kind.to_bytes(4, "little") for kind in (0, 1))  # DRAM and VRAM
_UCX_VERSION_BITS = 0x0F
_LAST_UCX_VERSION = 1  # UCP_OBJECT_VERSION_V2
_MOST_RAILS, _MOST_RAIL_BYTES = 64, 56


def read_metadata(blob: bytes) -> PeerMetadata:
    """Raises `TransferFailed` if NIXL must not get the blob."""
    fields = _Fields(blob)
    name = fields.take(b"Agent")
    if not _is_text(name, _MOST_NAME_BYTES):
        raise _refusal("its name is not printable ASCII")
    fields.count(b"Conns", 1, 1)
    backend = fields.take(b"t")
    if not _is_text(backend, _MOST_BACKEND_BYTES):
        raise _refusal("the name of its backend is not printable ASCII")
    address = fields.take(b"c")
    if (check := _ADDRESS_CHECKS.get(backend)) is not None:
        check(address)
    contact = blob[: fields.at]
    fields.expect(b"", b"MemSection")
    for _ in range(fields.count(b"nixlSecElms", 0, _MOST_SECTIONS)):
        _check_section(fields, backend)
    fields.check_end()
    return PeerMetadata(name.decode(), backend.decode(), contact, blob)


def _is_text(content: bytes, most_bytes: int) -> bool:
    is_short = 0 < len(content) <= most_bytes
    return is_short and content.isascii() and content.decode().isprintable()


# NIXL writes fields in sequence: a tag, a length of 8 bytes, the content, and a bar. The parser
# must know the tags, as they have no length:
#
#     nixlSerDes|  Agent NAME|  Conns 1|  t BACKEND|  c ADDRESS|               the contact
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


def _check_ucx(address: bytes) -> None:
    version = address[0] & _UCX_VERSION_BITS if address else None
    if version is None or version > _LAST_UCX_VERSION:
        raise _refusal(f"an address of UCX of version {version}")


#     nixlSerDes|  num_rails DIGITS|  (dest_data_ep_RAIL ADDRESS|)...
def _check_libfabric(address: bytes) -> None:
    fields = _Fields(address)
    digits = fields.take(b"num_rails")
    num_rails = int(digits) if digits.isdigit() and len(digits) < _LENGTH_BYTES else 0
    if not 1 <= num_rails <= _MOST_RAILS:
        raise _refusal(f"an address of LIBFABRIC with {digits[:16]!r} rails")
    for rail in range(num_rails):
        if not 1 <= len(fields.take(b"dest_data_ep_%d" % rail)) <= _MOST_RAIL_BYTES:
            raise _refusal(f"rail {rail} of LIBFABRIC has no address, or a longer one")
    fields.check_end()


_ADDRESS_CHECKS: dict[bytes, Callable[[bytes], None]] = {
    UCX.encode(): _check_ucx,
    b"LIBFABRIC": _check_libfabric,
}
"""Addresses of other backends are not checked."""


def _check_section(fields: _Fields, backend: bytes) -> None:
    fields.expect(b"bknd", backend)
    fields.expect(b"nixlDList", b"nixlSDList")
    fields.expect(b"t", *_KINDS)
    for _ in range(fields.count(b"n", 0, 1 << 20)):  # each must exist, or its field is rejected
        if len(fields.take(b"")) < _DESCRIPTOR_BYTES:
            raise _refusal("a descriptor is too short")


def _refusal(why: str) -> TransferFailed:
    return TransferFailed(f"the peer's metadata is refused: {why}")
