"""NIXL metadata of a prefill agent that lies: refused, and the decode agent goes on.

Each of these ended the agent, was logged as a defect, or made NIXL forget another peer.
"""

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvbus.engine import DecodeSession, Fetch
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.transport import PeerMetadata
from tests.agents import Agents
from tests.engines import Engine, engine, failure_of
from tests.examples import num_examples
from tests.prefill.inside import PrefillAgent, prefill_agent

pytestmark = pytest.mark.anyio
SCRIPT = Path(__file__).parent / "processes" / "altered_metadata.py"
HUGE = ((1 << 63) - 1).to_bytes(8, "little")
KIND = b"nixlSDList|t\x04\0\0\0\0\0\0\0"
Alter = Callable[[bytes], bytes]


def address_at(blob: bytes) -> int:
    """Where UCX's address begins."""
    return blob.index(b"|t\x03\0\0\0\0\0\0\0UCX|c") + 23


def named(blob: bytes, name: bytes) -> bytes:
    """The blob of an agent of another name."""
    own = PeerMetadata.read(blob).name.encode()
    start = blob.index(b"Agent") + 5
    return blob[:start] + len(name).to_bytes(8, "little") + name + blob[start + 8 + len(own) :]


def with_bytes(blob: bytes, at: int, put: bytes) -> bytes:
    return blob[:at] + put + blob[at + len(put) :]


LIES: dict[str, tuple[Alter, ErrorCode]] = {
    "a name that is no text": (
        lambda blob: named(blob, b"prefill/\xff"),
        ErrorCode.TRANSFER_FAILED,
    ),
    "a name with an end in it": (
        lambda blob: named(blob, b"prefill\0x"),
        ErrorCode.TRANSFER_FAILED,
    ),
    "the name of another agent": (lambda blob: named(blob, b"prefill/other"), ErrorCode.INVALID),
    "an address of an unknown version": (
        lambda blob: with_bytes(blob, address_at(blob), b"\x2b"),
        ErrorCode.TRANSFER_FAILED,
    ),
    "an address that leads out": (
        lambda blob: with_bytes(blob, address_at(blob) - 8, HUGE),
        ErrorCode.TRANSFER_FAILED,
    ),
    "memory of an unknown kind": (
        lambda blob: with_bytes(blob, blob.index(KIND) + len(KIND), b"\x00\xf2\x00\x00"),
        ErrorCode.TRANSFER_FAILED,
    ),
    "more descriptors than there are": (
        lambda blob: with_bytes(blob, blob.index(KIND) + len(KIND) + 14, HUGE),
        ErrorCode.TRANSFER_FAILED,
    ),
    "half of it": (lambda blob: blob[: len(blob) // 2], ErrorCode.TRANSFER_FAILED),
    "nothing": (lambda _: b"", ErrorCode.TRANSFER_FAILED),
}


def lying(agent: PrefillAgent, alter: Alter) -> None:
    """Have the agent tell peers altered metadata."""
    transport, honest = agent.runtime.transport, type(agent.runtime.transport).metadata

    def metadata(registrations: Any = None) -> Future[bytes]:
        altered: Future[bytes] = Future()
        altered.set_result(alter(honest(transport, registrations).result(20)))
        return altered

    vars(transport)["metadata"] = metadata


@asynccontextmanager
async def fetched(
    agent: PrefillAgent, target: Engine, *, fails: bool = False
) -> AsyncIterator[Fetch]:
    """One handoff from an engine that is new, and so by a new handshake."""
    async with agent.engine() as source:
        blocks = source.some_blocks(1, 32), target.some_blocks(2, 32)
        offer = await source.prefill.offer("r", num_tokens=32, block_ids=blocks[0])
        fetch = target.decode.fetch(offer.ticket, num_tokens=32, block_ids=blocks[1])
        yield fetch
        if fails:
            await offer.withdraw()
        await offer.released()


async def test_metadata_that_lies_fails_its_fetch_and_the_agent_goes_on(
    fresh: Agents,
) -> None:
    decode = fresh.prepare("decode")
    fresh.start(decode)
    failures: dict[str, FetchFailed] = {}
    async with (
        prefill_agent(fresh.folder / "honest") as honest,
        engine(DecodeSession, decode.attach) as target,
    ):
        async with fetched(honest, target) as fetch:
            await fetch.completed()
        for number, (lie, (alter, _)) in enumerate(LIES.items()):
            async with prefill_agent(fresh.folder / f"liar{number}") as liar:
                lying(liar, alter)
                async with fetched(liar, target, fails=True) as fetch:
                    failures[lie] = await failure_of(fetch)
        async with fetched(honest, target) as fetch:
            await fetch.completed()

    assert {lie: failure.code for lie, failure in failures.items()} == {
        lie: code for lie, (_, code) in LIES.items()
    }


async def test_metadata_under_the_name_of_a_known_agent_does_not_take_its_place(
    fresh: Agents,
) -> None:
    decode = fresh.prepare("decode")
    fresh.start(decode)
    async with (
        prefill_agent(fresh.folder / "honest") as honest,
        prefill_agent(fresh.folder / "liar") as liar,
        engine(DecodeSession, decode.attach) as target,
    ):
        async with fetched(honest, target) as fetch:
            await fetch.completed()
        name = honest.runtime.transport.name
        lying(liar, lambda blob: named(blob, name.encode()))
        liar.runtime.transport.name = name
        async with fetched(liar, target, fails=True) as fetch:
            failure = await failure_of(fetch)
        async with fetched(honest, target) as fetch:
            await fetch.completed()

    assert failure.code is ErrorCode.TRANSFER_FAILED
    assert "another peer has that name" in failure.message


def test_a_transport_outlives_hundreds_of_altered_blobs_and_still_reads() -> None:
    """In a process of its own, as what is not refused in time ends it."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(num_examples(2000))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (ended.returncode, ended.stdout.split()) == (0, ["refused", "read"])
