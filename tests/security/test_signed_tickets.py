"""Where a site signs its tickets, those that a client made up or changed lead nowhere."""

import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from kvbus.agent import load_ticket_keys
from kvbus.engine import Fetch, MemorySession, PrefillSession
from kvbus.errors import ConfigError, ErrorCode, FetchFailed
from kvbus.geometry import BlockTable
from kvbus.protocol import Rendezvous, Ticket, TicketKeys, packed_tables
from tests.agents import AgentProcess, Agents, agents_ended
from tests.engines import NHD, Engine, failure_of, make_spec, pair, same, works
from tests.faults.test_configuration import ended
from tests.security.listening import FORGED

pytestmark = pytest.mark.anyio
KEY, OLD_KEY = b"k" * 32, b"o" * 44
NUM_BAD, NUM_REPLAYED = 2000, 200
Change = Callable[[Ticket], Ticket]


def key_file(folder: Path, key: bytes, *, mode: int = 0o600) -> str:
    path = folder / f"{key[:1].decode()}.key"
    path.write_bytes(key + b"\n")
    path.chmod(mode)
    return str(path)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agents]:
    """A prefill agent that still signs with the old key, and a decode agent that knows both."""
    folder = tmp_path_factory.mktemp("keys")
    new, old = key_file(folder, KEY), key_file(folder, OLD_KEY)
    with agents_ended(Agents) as agents:
        agents.start(
            agents.prepare("prefill", ticket_keys=[old]),
            agents.prepare("decode", ticket_keys=[new, old], allowed_peers=["127.0.0.1"]),
        )
        yield agents


@pytest.fixture
async def engines(site: Agents) -> AsyncIterator[tuple[Engine, Engine]]:
    """They hold nothing after each test."""
    async with AsyncExitStack() as stack:
        prefill, decode = site.all
        yield await stack.enter_async_context(pair(prefill.attach, decode.attach))
    site.check()


@contextmanager
def listener(host: str = "127.0.0.1") -> Iterator[tuple[str, Callable[[], int]]]:
    """An endpoint that nobody may connect to, and how many did."""
    with socket.create_server((host, 0)) as server:
        server.setblocking(False)

        def num_connected() -> int:
            count = 0
            while True:
                try:
                    server.accept()[0].close()
                except BlockingIOError:
                    return count
                count += 1

        yield f"tcp://{host}:{server.getsockname()[1]}", num_connected


def signed(ticket: Ticket, *, ago_s: float = 0.0, **changes: Any) -> Ticket:
    """By an agent of the site."""
    changed = structs.replace(ticket, **changes)
    return TicketKeys([KEY]).sign(changed, now_s=time.time() - ago_s, lifetime_s=600)


def fetch_of(target: Engine, ticket: Ticket, **more: Any) -> Fetch:
    return target.decode.fetch(ticket.to_json(), num_tokens=0, block_ids={"full": []}, **more)


async def failures_of(target: Engine, tickets: Sequence[Ticket]) -> list[FetchFailed]:
    """Some at a time, as an engine may ask for."""
    failures: list[FetchFailed] = []
    for some in batched(tickets, 200):
        fetches = [fetch_of(target, ticket) for ticket in some]
        failures += [await failure_of(fetch) for fetch in fetches]
    return failures


def batched(tickets: Sequence[Ticket], size: int) -> Iterator[Sequence[Ticket]]:
    yield from (tickets[start : start + size] for start in range(0, len(tickets), size))


async def test_keys_are_replaced_while_handoffs_go_on(engines):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})

    assert len(offer.ticket["signature"]) == 64
    await fetch_of(target, signed(Ticket.from_json(offer.ticket))).completed()
    assert await works(source, target)


async def test_blocks_that_a_signed_ticket_names_are_read_ahead_and_others_are_refused(
    engines, site
):
    source, target = engines
    theirs, ours = source.some_blocks(5, 40), target.some_blocks(6, 40)
    assert await works(source, target)
    offer = await source.prefill.offer("r", num_tokens=40, block_ids=theirs)
    ticket, before = Ticket.from_json(offer.ticket), target.snapshot()
    others = packed_tables({"full": BlockTable.of(theirs["full"][::-1])}, max_blocks=9)

    failures = [
        await failure_of(
            target.decode.fetch(
                structs.replace(ticket, blocks=blocks).to_json(), num_tokens=40, block_ids=ours
            )
        )
        for blocks in (others, "")
    ]
    unchanged = same(target.snapshot(), before)
    fetch = target.decode.fetch(ticket.to_json(), num_tokens=40, block_ids=ours)
    await fetch.completed()

    assert [failure.code for failure in failures] == [ErrorCode.FORBIDDEN] * 2
    assert unchanged
    (line,) = site.all[1].says("handoff.completed", fetch_id=fetch.fetch_id)
    assert line["ahead"]


async def test_an_altered_or_redirected_ticket_is_refused_before_anything_is_connected(engines):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})
    ticket, before = Ticket.from_json(offer.ticket), target.snapshot()
    with listener() as (elsewhere, num_connected):
        changes = [
            {"endpoint": elsewhere},
            {"signature": ""},
            {"endpoint": elsewhere, "signature": ""},
            {"secret": FORGED},
            {"prompt_digest": "another"},
            {"expires_at_s": 2**40},
        ]
        bad = [structs.replace(ticket, **change) for change in changes]
        failures = await failures_of(target, bad * (NUM_BAD // len(bad)))
        connected = num_connected()

    assert {failure.code for failure in failures} == {ErrorCode.FORBIDDEN}
    assert connected == 0
    assert same(target.snapshot(), before)
    await fetch_of(target, ticket).completed()


@pytest.mark.parametrize(
    ("changes", "ago_s", "code", "said"),
    [
        ({}, 700, ErrorCode.OFFER_EXPIRED, "expired .* s ago, by the clock of this machine"),
        ({}, -60, ErrorCode.FORBIDDEN, "in the future, by the clock"),
        ({"audience": "another engine"}, 0, ErrorCode.FORBIDDEN, "is for 'another engine'"),
        ({"prompt_digest": "another"}, 0, ErrorCode.FORBIDDEN, "of another prompt"),
        ({"prompt_digest": ""}, 0, ErrorCode.FORBIDDEN, "of another prompt"),
        ({"endpoint": "tcp://127.0.0.2:7"}, 0, ErrorCode.FORBIDDEN, "not in 'allowed_peers'"),
    ],
    ids=["expired", "early", "for another", "of another prompt", "of any prompt", "not allowed"],
)
async def test_a_ticket_that_the_site_signed_is_good_for_what_it_says(
    engines, changes, ago_s, code, said
):
    source, target = engines
    offer = await source.prefill.offer(
        "r", num_tokens=0, block_ids={"full": []}, prompt_digest="prompt"
    )
    ticket = signed(Ticket.from_json(offer.ticket), ago_s=ago_s, **changes)

    with pytest.raises(Exception, match=said) as refused:
        await fetch_of(target, ticket, prompt_digest="prompt").completed()

    assert refused.value.code is code
    await fetch_of(target, Ticket.from_json(offer.ticket), prompt_digest="prompt").completed()


async def test_a_ticket_for_a_named_engine_or_agent_is_used_by_it(engines, site):
    source, target = engines
    for audience in (target.spec.engine_id, site.all[1].settings["agent_id"]):
        offer = await source.prefill.offer(
            audience, num_tokens=0, block_ids={"full": []}, audience=audience
        )

        await fetch_of(target, Ticket.from_json(offer.ticket)).completed()


async def test_a_ticket_that_was_read_is_refused_here(engines, site):
    source, target = engines
    offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})
    ticket = Ticket.from_json(offer.ticket)
    await fetch_of(target, ticket).completed()

    failures = await failures_of(target, [ticket] * NUM_REPLAYED)

    assert {failure.code for failure in failures} == {ErrorCode.OFFER_COMPLETED}
    assert {failure.stage for failure in failures} == {"requested"}


async def test_an_allow_list_holds_without_keys_and_for_agents_that_an_engine_names(fresh):
    agents = fresh.prepare("prefill"), fresh.prepare("decode", allowed_peers=["127.0.0.1"])
    fresh.start(*agents)
    with listener("127.0.0.2") as (elsewhere, num_connected):
        async with pair(agents[0].attach, agents[1].attach) as (source, target):
            offer = await source.prefill.offer("r", num_tokens=0, block_ids={"full": []})
            ticket = Ticket.from_json(offer.ticket)

            redirected = structs.replace(ticket, endpoint=elsewhere)
            failures = [await failure_of(fetch_of(target, redirected)) for _ in range(20)]
            works_on = await works(source, target)
            await offer.withdraw()
            failures.append(await failure_of_spread(agents[0], target, elsewhere))
        connected = num_connected()

    assert {failure.code for failure in failures} == {ErrorCode.FORBIDDEN}
    assert connected == 0
    assert works_on


async def failure_of_spread(home: AgentProcess, target: Engine, elsewhere: str) -> FetchFailed:
    """Of a fetch from an engine that says that one of its ranks is ``elsewhere``."""
    spec = make_spec(tp=2)
    async with (
        PrefillSession(home.attach, spec) as control,
        MemorySession(home.attach, spec, 0) as rank,
    ):
        await rank.allocate(NHD, num_blocks=4)
        await control.register(others={elsewhere: [1]}, access=FORGED)
        offer = await control.offer("r", num_tokens=0, block_ids={"full": []})
        failure = await failure_of(fetch_of(target, Ticket.from_json(offer.ticket)))
        await offer.withdraw()
    return failure


@pytest.mark.parametrize(
    ("key", "mode", "said"),
    [
        (KEY, 0o640, "others can read the secret in it; run 'chmod 0600"),
        (b"short", 0o600, "has a key of 5 bytes; 32 at least are needed"),
        (b"x" * 5000, 0o600, "larger than 4096 bytes"),
    ],
    ids=["readable", "short", "long"],
)
def test_a_wrong_key_file_is_refused_by_what_is_wrong(tmp_path, key, mode, said):
    path = key_file(tmp_path, key, mode=mode)

    with pytest.raises(ConfigError, match=f"'ticket_keys'.*{said}"):
        load_ticket_keys([path])


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_agent_without_its_key_file_does_not_start_and_says_why(fresh, role):
    agent: AgentProcess = fresh.prepare(role)
    agent.settings["ticket_keys"] = [str(agent.folder / "none.key")]
    agent.expected_trouble = {"not json"}

    status, log = ended(agent)

    assert status == 1
    assert "error: key 'ticket_keys': cannot read" in log


async def test_a_rendezvous_that_the_site_has_not_signed_leads_nowhere(site, engines):
    source, target = engines
    keys = TicketKeys([KEY])
    with listener() as (endpoint, num_connections):
        forged = Rendezvous(uuid.uuid4().hex, endpoint)
        ours = target.some_blocks(3, 40)
        for meets in (
            forged,
            TicketKeys([b"f" * 32]).sign(forged, now_s=time.time(), lifetime_s=9),
        ):
            fetch = target.decode.fetch(meets.to_json(), num_tokens=40, block_ids=ours)
            failure = await failure_of(fetch)
            assert (failure.stage, failure.code) == ("requested", ErrorCode.FORBIDDEN)
        assert not num_connections()

    meets = keys.sign(
        Rendezvous(uuid.uuid4().hex, site.all[0].peer), now_s=time.time(), lifetime_s=60
    )
    fetch = target.decode.fetch(meets.to_json(), num_tokens=40, block_ids=ours)
    offer = await source.prefill.offer(
        "r",
        num_tokens=40,
        block_ids=source.some_blocks(3, 40),
        transfer_id=meets.transfer_id,
    )
    await fetch.completed()
    await offer.released()
