"""Metadata of peers for backends other than UCX, before NIXL gets it."""

import pytest

from kvbus.data.metadata import read_metadata
from kvbus.errors import TransferFailed

START = b"nixlSerDes|"


def field(tag: bytes, content: bytes) -> bytes:
    return tag + len(content).to_bytes(8, "little") + content + b"|"


def number(count: int) -> bytes:
    return count.to_bytes(8, "little")


def rails(*addresses: bytes, digits: bytes | None = None) -> bytes:
    """An address of LIBFABRIC, as NIXL 1.5.1 writes it."""
    told = str(len(addresses)).encode() if digits is None else digits
    each = [field(b"dest_data_ep_%d" % rail, one) for rail, one in enumerate(addresses)]
    return START + field(b"num_rails", told) + b"".join(each)


def blob(
    backend: bytes, address: bytes, *, section: bytes = b"", num_connections: int = 1
) -> bytes:
    memory = field(b"bknd", section or backend) + field(b"nixlDList", b"nixlSDList")
    memory += (
        field(b"t", (0).to_bytes(4, "little")) + field(b"n", number(1)) + field(b"", b"x" * 30)
    )
    connection = field(b"t", backend) + field(b"c", address)
    return (
        START
        + field(b"Agent", b"peer")
        + field(b"Conns", number(num_connections))
        + connection * num_connections
        + field(b"", b"MemSection")
        + field(b"nixlSecElms", number(1))
        + memory
    )


@pytest.mark.parametrize(
    ("backend", "address"),
    [("LIBFABRIC", rails(b"a" * 56)), ("LIBFABRIC", rails(b"a", b"b")), ("Mooncake", b"any bytes")],
)
def test_whole_metadata_names_its_backend(backend: str, address: bytes) -> None:
    read = read_metadata(blob(backend.encode(), address))

    assert (read.name, read.backend) == ("peer", backend)


@pytest.mark.parametrize(
    "wrong",
    [
        blob(b"LIBFABRIC", rails(digits=b"99999999999999999999")),
        blob(b"LIBFABRIC", rails(*[b"a"] * 65)),
        blob(b"LIBFABRIC", rails(digits=b"0")),
        blob(b"LIBFABRIC", rails(b"a", digits=b"-1")),
        blob(b"LIBFABRIC", rails(b"a", digits=b"2")),
        blob(b"LIBFABRIC", rails(b"a" * 57)),
        blob(b"LIBFABRIC", rails(b"")),
        blob(b"LIBFABRIC", rails(b"a") + b"more"),
        blob(b"LIBFABRIC", b"\0"),
        blob(b"UCX", b""),
        blob(b"UCX", b"\x0f"),
        blob(b"Mooncake", b"a", section=b"UCX"),
        blob(b"Mooncake", b"a", num_connections=2),
        blob(b"Moon\ncake", b"a"),
        blob(b"", b"a"),
        blob(b"M" * 33, b"a"),
    ],
)
def test_wrong_address_or_backend_is_refused(wrong: bytes) -> None:
    with pytest.raises(TransferFailed, match="metadata is refused"):
        read_metadata(wrong)
