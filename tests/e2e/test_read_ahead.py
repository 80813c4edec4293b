"""Blocks that a ticket names are read before the lease; the prefill agent has the last word."""

import shutil
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from kvbus.agent.process.runtime import Runtime
from kvbus.engine import DecodeSession, Fetch, PrefillSession
from kvbus.errors import ErrorCode, FetchFailed
from kvbus.geometry import BlockTable
from kvbus.protocol import Outcome, Ticket, packed_tables
from kvbus_decode.fetch import events as ev
from tests.agents import AgentProcess, Agents, agents_ended, until
from tests.decode.inside import decode_agent
from tests.engines import Engine, engine, expected_after, failure_of, make_spec, pair, same, works
from tests.prefill.inside import given_back

pytestmark = pytest.mark.anyio

NUM_TOKENS = 16 * 3 + 5


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path, as Linux allows 107 bytes for a Unix socket's."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def shared_few() -> Iterator[Agents]:
    """A prefill agent that names two blocks at most, and a decode agent that claims first."""
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill", ticket_blocks=2), agents.prepare("decode", optimistic=False)
        )
        yield agents


@pytest.fixture
def few(shared_few: Agents) -> Iterator[tuple[AgentProcess, AgentProcess]]:
    """They hold nothing after each test."""
    yield shared_few.all[0], shared_few.all[1]
    shared_few.check()


@pytest.fixture
def over_tcp() -> Iterator[tuple[AgentProcess, AgentProcess]]:
    """Agents as on two machines: every READ needs the progress of its target."""
    env = {"UCX_TLS": "tcp"}
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill", env=env), agents.prepare("decode", env=env, path="direct")
        )
        yield agents.all[0], agents.all[1]
        agents.check()


async def start(
    source: Engine, target: Engine, num_tokens: int = NUM_TOKENS, first_token: int = 0
) -> tuple[Any, Fetch, Any]:
    """A handoff that has begun, and what the decode engine's memory must be in its end."""
    theirs = source.some_blocks(5, num_tokens)
    ours = target.some_blocks(6, num_tokens, first_token)
    wanted = expected_after(
        target.snapshot(),
        source,
        theirs,
        target,
        ours,
        num_tokens=num_tokens,
        first_token=first_token,
    )
    offer = await source.prefill.offer(uuid.uuid4().hex, num_tokens=num_tokens, block_ids=theirs)
    fetch = target.decode.fetch(
        offer.ticket, num_tokens=num_tokens, block_ids=ours, first_token=first_token
    )
    return offer, fetch, wanted


def line_of(decode: AgentProcess, fetch: Fetch) -> dict[str, Any]:
    (line,) = decode.says("handoff.completed", fetch_id=fetch.fetch_id)
    return line


async def test_the_first_handoff_of_two_engines_claims_and_the_next_ones_read_ahead(
    prefill, decode
):
    async with pair(prefill.attach, decode.attach) as (source, target):
        ahead = []
        for _ in range(3):
            offer, fetch, wanted = await start(source, target)
            await fetch.completed()
            outcome = await offer.released()

            assert same(target.snapshot(), wanted)
            assert outcome is Outcome.COMPLETED
            ahead.append(line_of(decode, fetch)["ahead"])

    assert ahead == [False, True, True]


async def test_a_read_that_needs_the_prefill_agents_progress_has_the_claim_beside_it(over_tcp):
    prefill, decode = over_tcp
    async with pair(prefill.attach, decode.attach) as (source, target):
        lines = []
        for _ in range(3):
            offer, fetch, wanted = await start(source, target)
            await fetch.completed()
            await offer.released()

            assert same(target.snapshot(), wanted)
            lines.append(line_of(decode, fetch))

    assert [line["path"] for line in lines] == ["direct"] * 3
    assert [line["ahead"] for line in lines] == [False, True, True]
    assert [line["leased"] for line in lines] == [True] * 3


async def test_an_offer_that_the_decode_engine_has_already_is_taken_by_one_request(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)

        offer, fetch, wanted = await start(source, target, 48, first_token=48)
        await fetch.completed()

        assert await offer.released() is Outcome.COMPLETED
        assert same(target.snapshot(), wanted)
    line = line_of(decode, fetch)
    assert (line["ahead"], line["leased"], line["claiming_ms"]) == (True, False, 0)


@pytest.mark.parametrize("closed", ["too many blocks", "optimistic = false", "open", "in chunks"])
async def test_a_fetch_that_cannot_be_read_ahead_claims_first_and_is_as_good(
    prefill, decode, few, closed
):
    holder = few[0] if closed == "too many blocks" else prefill
    reader = few[1] if closed == "optimistic = false" else decode
    async with pair(holder.attach, reader.attach) as (source, target):
        assert await works(source, target)
        theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
        wanted = expected_after(
            target.snapshot(), source, theirs, target, ours, num_tokens=NUM_TOKENS
        )

        offer = await source.prefill.offer(
            "r", num_tokens=NUM_TOKENS, block_ids=theirs, sealed=closed != "open"
        )
        chunks = {"piece_tokens": 16} if closed == "in chunks" else {}
        fetch = target.decode.fetch(offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours, **chunks)
        if closed == "open":
            await offer.seal()
        await fetch.completed()
        await offer.released()

        assert same(target.snapshot(), wanted)
    line = line_of(reader, fetch)
    assert (line["ahead"], line["leased"]) == (False, True)


async def test_of_two_decode_engines_that_read_one_offer_ahead_one_has_it(
    prefill, decode, other_decode
):
    async with (
        engine(PrefillSession, prefill.attach, make_spec(), seed=1) as source,
        engine(DecodeSession, decode.attach, make_spec(), seed=2) as one,
        engine(DecodeSession, other_decode.attach, make_spec(), seed=3) as other,
    ):
        for target in (one, other):
            assert await works(source, target)
        for number in range(10):
            theirs = source.some_blocks(number, NUM_TOKENS)
            tables = {t.spec.engine_id: t.some_blocks(number, NUM_TOKENS) for t in (one, other)}
            wanted = {
                t.spec.engine_id: expected_after(
                    t.snapshot(), source, theirs, t, tables[t.spec.engine_id], num_tokens=NUM_TOKENS
                )
                for t in (one, other)
            }
            offer = await source.prefill.offer(
                f"r{number}", num_tokens=NUM_TOKENS, block_ids=theirs
            )
            winners: list[Engine] = []
            codes: list[ErrorCode] = []

            async def read(
                target: Engine,
                offer: Any = offer,
                tables: Any = tables,
                winners: list[Engine] = winners,
                codes: list[ErrorCode] = codes,
            ) -> None:
                ours = tables[target.spec.engine_id]
                fetch = target.decode.fetch(
                    offer.ticket, num_tokens=NUM_TOKENS, block_ids=ours, timeout_s=30.0
                )
                try:
                    await fetch.completed()
                    winners.append(target)
                except FetchFailed as failure:
                    codes.append(failure.code)
                    if not failure.blocks_free:
                        await fetch.blocks_freed()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read, one)
                tasks.start_soon(read, other)
            await offer.released()

            assert codes == [ErrorCode.OFFER_COMPLETED]
            (winner,) = winners
            assert same(winner.snapshot(), wanted[winner.spec.engine_id])


async def test_a_ticket_that_was_altered_to_name_other_blocks_never_completes(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        theirs, ours = source.some_blocks(5, NUM_TOKENS), target.some_blocks(6, NUM_TOKENS)
        offer = await source.prefill.offer("r", num_tokens=NUM_TOKENS, block_ids=theirs)
        others = {"full": BlockTable.of([block ^ 1 for block in theirs["full"]])}
        ticket = Ticket.from_json(offer.ticket)
        altered = msgspec.structs.replace(ticket, blocks=packed_tables(others, max_blocks=9))

        fetch = target.decode.fetch(altered.to_json(), num_tokens=NUM_TOKENS, block_ids=ours)
        failure = await failure_of(fetch)
        if not failure.blocks_free:
            await fetch.blocks_freed()

        assert failure.code is ErrorCode.GEOMETRY
        assert "altered" in failure.message
        await offer.withdraw()
        assert await offer.released() is Outcome.WITHDRAWN


async def test_a_ticket_whose_blocks_are_none_is_refused(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        offer = await source.prefill.offer(
            "r", num_tokens=NUM_TOKENS, block_ids=source.some_blocks(5, NUM_TOKENS)
        )
        ours = target.some_blocks(6, NUM_TOKENS)

        ticket = {**offer.ticket, "blocks": "bm9uZQ=="}
        failure = await failure_of(
            target.decode.fetch(ticket, num_tokens=NUM_TOKENS, block_ids=ours)
        )

        assert failure.code is ErrorCode.INVALID
        await offer.withdraw()
        await offer.released()


class Question:
    """The question whether what was read is good: kept back, until `ask`."""

    def __init__(self, runtime: Runtime) -> None:
        self._commands = runtime.service._driver.commands
        self._kept: list[Any] = []
        self._asks = {kind: self._commands[kind] for kind in (ev.SendConfirm, ev.SendTake)}
        self._commands |= dict.fromkeys(self._asks, self._kept.append)

    async def is_due(self) -> None:
        """Return once all bytes have landed, and nothing but the yes is missing."""
        await until(lambda: self._kept)

    def ask(self) -> None:
        self._commands |= self._asks
        for command in self._kept:
            self._asks[type(command)](command)


@asynccontextmanager
async def reader(folder: Path) -> AsyncIterator[tuple[Runtime, Engine]]:
    """A decode agent in this process, with an engine, until it has given its memory back."""
    async with decode_agent(folder) as runtime:
        async with engine(DecodeSession, runtime.config.attach_path, seed=2) as target:
            local = runtime.agent.engines.engines[target.spec.engine_id]
            processes = list(local.processes)
            yield runtime, target
        await until(lambda: all(given_back(process) for process in processes))


async def test_an_offer_that_is_withdrawn_between_the_last_byte_and_the_yes_fails(
    prefill, short_folder
):
    async with (
        engine(PrefillSession, prefill.attach, seed=1) as source,
        reader(short_folder) as (runtime, target),
    ):
        assert await works(source, target)
        question = Question(runtime)
        offer, fetch, wanted = await start(source, target)
        await question.is_due()
        assert same(target.snapshot(), wanted), "all has landed, and was right"

        await offer.withdraw()
        await offer.released()  # its blocks are overwritten by now
        question.ask()
        failure = await failure_of(fetch)

    assert failure.code is ErrorCode.OFFER_WITHDRAWN
    assert failure.blocks_free


async def test_a_prefill_agent_that_comes_back_between_the_last_byte_and_the_yes_says_no(
    short_folder,
):
    with agents_ended(Agents) as agents:
        prefill = agents.prepare("prefill")
        agents.start(prefill)
        async with reader(short_folder) as (runtime, target):
            async with engine(PrefillSession, prefill.attach, seed=1) as source:
                assert await works(source, target)
                question = Question(runtime)
                _, fetch, _ = await start(source, target)
                await question.is_due()
                prefill.kill()
            prefill.start()
            question.ask()
            failure = await failure_of(fetch)

    assert failure.code in {ErrorCode.PEER_LOST, ErrorCode.STALE}
    assert failure.blocks_free
