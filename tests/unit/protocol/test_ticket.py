"""A ticket survives any JSON on its way, and a map that is none is refused."""

import base64
import json
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbus.errors import ErrorCode, ProtocolError
from kvbus.geometry import BlockTable
from kvbus.protocol import MAX_TICKET_BLOCKS, TICKET_VERSION, Ticket, packed_tables, prompt_digest
from tests.unit.protocol.strategies import PLAIN, TEXT, value_or_refusal

NAMES = TEXT.filter(bool)
BLOCKS = st.lists(st.integers(0, 2**32 - 1), max_size=9)
TABLE = st.builds(BlockTable.of, BLOCKS, first_block=st.integers(0, 99))
TABLES = st.dictionaries(NAMES, TABLE, max_size=3)
TICKETS = st.builds(
    Ticket,
    *([NAMES] * 2),
    st.just("tcp://[fd00::1]:7501"),
    *([NAMES] * 4),
    num_tokens=st.integers(0, 2**31 - 1),
    secret=NAMES.map(lambda name: 16 * name[:8]),
    server_key=TEXT,
    signature=TEXT,
    blocks=TABLES.map(lambda tables: packed_tables(tables, max_blocks=27)),
    expires_at_s=st.integers(0, 2**40),
    kvbus=st.just(TICKET_VERSION),
)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=50)
CONDITIONS = st.lists(st.text(st.characters(), max_size=5), max_size=3)
IDS = "engine", "instance", "offer", "request"
FIELDS = Ticket("agent", "boot", "tcp://h:1", *IDS, 9, 32 * "0").to_json()


@given(TICKETS, st.dictionaries(TEXT, PLAIN))
def test_ticket_survives_json_and_more_fields(ticket: Ticket, added: dict[str, Any]) -> None:
    fields = ticket.to_json()
    assert set(fields) == set(Ticket.__struct_fields__)
    assert all(type(value) in {str, int} for value in fields.values())
    assert Ticket.from_json(json.loads(json.dumps(fields))) == ticket
    assert Ticket.from_json(msgpack.unpackb(msgpack.packb(fields))) == ticket
    assert Ticket.from_json(added | fields) == ticket


@given(PLAIN, st.sampled_from(sorted(FIELDS)), PLAIN)
def test_any_ticket_is_kept_or_refused(anything: object, field: str, value: object) -> None:
    ticket = value_or_refusal(lambda: Ticket.from_json(FIELDS | {field: value}))
    assert isinstance(value_or_refusal(lambda: Ticket.from_json(anything)), ProtocolError)
    if isinstance(ticket, Ticket):
        taken = getattr(ticket, field)
        assert (type(taken), taken) == (type(value), value)
    elif ticket.code is ErrorCode.UNSUPPORTED_VERSION:
        assert field == "kvbus"
        assert ticket.detail == {"theirs": value, "ours": TICKET_VERSION}
    else:
        assert ticket.code is ErrorCode.INVALID


def without(field: str) -> dict[str, object]:
    return {key: value for key, value in FIELDS.items() if key != field}


NEEDED = ("agent_id", "agent_boot", "engine_id", "engine_instance", "offer_id", "request_id")
REFUSED: dict[str, object] = {
    **{f"without {name}": without(name) for name in (*NEEDED, "endpoint", "num_tokens", "secret")},
    "text": json.dumps(FIELDS),
    "list": list(FIELDS.items()),
    "struct": object(),
    "many tokens": FIELDS | {"num_tokens": 2**31},
    "huge tokens": FIELDS | {"num_tokens": 2**200},
    "long offer": FIELDS | {"offer_id": 257 * "x"},
    "number keys": {1: 2},
    "half a character as key": FIELDS | json.loads(r'{"\ud800": 1}'),
    "half a character as value": FIELDS | json.loads(r'{"offer_id": "\ud800"}'),
    "half a character as endpoint": FIELDS | json.loads(r'{"endpoint": "tcp://\udfff"}'),
    "endpoint of a file": FIELDS | {"endpoint": "ipc:///run/x:1"},
    "endpoint in this process": FIELDS | {"endpoint": "inproc://x:1"},
    "endpoint without a port": FIELDS | {"endpoint": "tcp://h"},
    "endpoint with a source": FIELDS | {"endpoint": "tcp://10.0.0.1:1;h:1"},
    "blocks without end": FIELDS | {"blocks": 131_073 * "A"},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_ticket_is_refused_by_the_field_that_it_lacks(why: str) -> None:
    with pytest.raises(ProtocolError) as refused:
        Ticket.from_json(REFUSED[why])
    assert refused.value.code is ErrorCode.INVALID
    assert not why.startswith("without") or why.split()[1] in refused.value.message


def test_a_ticket_nested_without_end_is_refused_or_ignored() -> None:
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"x": deep}
    assert Ticket.from_json(FIELDS | {"added": deep}).offer_id == "offer"
    with pytest.raises(ProtocolError):
        Ticket.from_json(FIELDS | {"offer_id": deep})


def test_a_ticket_without_a_version_is_of_the_first() -> None:
    assert Ticket.from_json(without("kvbus")) == Ticket.from_json(FIELDS | {"kvbus": 1})


@given(TABLES)
def test_ticket_names_blocks_of_offer_or_none_when_too_many(tables: dict[str, BlockTable]) -> None:
    num_blocks = sum(len(table) for table in tables.values())
    blocks = packed_tables(tables, max_blocks=num_blocks)
    assert Ticket.from_json(FIELDS | {"blocks": blocks}).tables() == tables
    assert packed_tables(tables, max_blocks=num_blocks - 1) == ""
    assert Ticket.from_json(FIELDS).tables() == {}


def test_max_blocks_of_prefill_agent_fit_ticket() -> None:
    names = [f"{number:03}{253 * 'g'}" for number in range(64)]
    share = MAX_TICKET_BLOCKS // len(names)
    tables = {name: BlockTable.of(range(share), first_block=2**20) for name in names}
    blocks = packed_tables(tables, max_blocks=MAX_TICKET_BLOCKS)
    assert blocks
    assert Ticket.from_json(FIELDS | {"blocks": blocks}).tables() == tables


@given(st.text() | st.binary().map(lambda noise: base64.b64encode(noise).decode()))
def test_any_text_is_block_tables_or_refused(blocks: str) -> None:
    tables = value_or_refusal(Ticket.from_json(FIELDS | {"blocks": blocks}).tables)
    assert isinstance(tables, dict) or tables.code is ErrorCode.INVALID


@given(TOKENS, CONDITIONS, TOKENS, CONDITIONS)
def test_digests_are_equal_only_for_equal_tokens_and_conditions(
    tokens: list[int], conditions: list[str], other: list[int], others: list[str]
) -> None:
    same = (tokens, conditions) == (other, others)
    assert (prompt_digest(tokens, conditions) == prompt_digest(other, others)) == same
    assert prompt_digest([], ["ab", "c"]) != prompt_digest([], ["a", "bc"])
