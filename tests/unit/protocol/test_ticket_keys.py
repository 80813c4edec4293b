"""Agents accept a signed ticket unaltered, in its time, and with their key."""

import hmac
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol import CLOCK_TOLERANCE_S, Rendezvous, StartFetch, Ticket, TicketKeys
from tests.unit.vectors.golden import example

OLD, NEW, WRONG = (TicketKeys([letter * 32]) for letter in (b"o", b"n", b"w"))
BOTH = TicketKeys([b"n" * 32, b"o" * 32])
NOW_S, LIFETIME_S = 1_760_000_000.5, 600
UNSIGNED = replace(Ticket.from_json(example(StartFetch).ticket), signature="")
WITHOUT_BLOCKS = replace(UNSIGNED, blocks="")
MEETS = Rendezvous(32 * "1", "tcp://10.0.0.1:7501", audience="decode")
NOT_SIGNED = {"traceparent", "cell"}
"""Agents that do not know the field drop it, and check the rest."""


def signed(ticket: Any, keys: TicketKeys = OLD) -> Any:
    return keys.sign(ticket, now_s=NOW_S, lifetime_s=LIFETIME_S)


def is_committed(keys: TicketKeys, ticket: Ticket | Rendezvous, now_s: float = NOW_S) -> bool:
    try:
        keys.check_signature(ticket)
        keys.check_times(ticket, now_s=now_s)
    except LocalError:
        return False
    return True


@pytest.mark.parametrize("unsigned", [UNSIGNED, MEETS], ids=["ticket", "rendezvous"])
def test_signed_ticket_is_accepted_during_rotation(unsigned: Ticket | Rendezvous) -> None:
    older, newer = signed(unsigned), signed(unsigned, BOTH)
    carried = msgspec.json.decode(msgspec.json.encode(older.to_json()))
    assert is_committed(OLD, type(unsigned).from_json(carried | {"added_by_a_router": 1}))
    assert is_committed(BOTH, older), "signed with the key before"
    assert is_committed(NEW, newer), "the first key signs"
    assert not is_committed(OLD, newer)
    assert not is_committed(WRONG, older)
    with pytest.raises(LocalError, match="is not signed") as refused:
        OLD.check_signature(unsigned)
    assert refused.value.code is ErrorCode.FORBIDDEN


@pytest.mark.parametrize(
    ("unsigned", "field"),
    [
        (one, field)
        for one in (WITHOUT_BLOCKS, UNSIGNED, MEETS)
        for field in sorted({*one.__struct_fields__})
    ],
    ids=str,
)
@given(text=st.text(max_size=70), number=st.integers(-(2**70), 2**70))
def test_altered_ticket_is_refused(
    unsigned: Ticket | Rendezvous, field: str, text: str, number: int
) -> None:
    ticket = signed(unsigned)
    value = text if isinstance(getattr(ticket, field), str) else number
    assume(value != getattr(ticket, field))
    assert is_committed(OLD, replace(ticket, **{field: value})) == (field in NOT_SIGNED)


def test_blockless_ticket_is_signed_as_by_agents_without_field() -> None:
    ticket = signed(WITHOUT_BLOCKS)
    fields = {**ticket.to_json(), "signature": ""}
    del fields["blocks"], fields["traceparent"], fields["cell"]
    signature = hmac.digest(32 * b"o", b"kvbus ticket\n" + msgspec.json.encode(fields), "sha256")
    assert signature.hex() == ticket.signature


@pytest.mark.parametrize(
    ("late_s", "said"),
    [
        (-CLOCK_TOLERANCE_S, ""),
        (-CLOCK_TOLERANCE_S - 2, "issued 32 s in the future"),
        (LIFETIME_S + CLOCK_TOLERANCE_S - 1, ""),
        (LIFETIME_S + CLOCK_TOLERANCE_S + 1, "expired 32 s ago"),
    ],
)
def test_a_ticket_is_of_its_time_and_a_clock_that_is_off_is_said(late_s: float, said: str) -> None:
    ticket = signed(UNSIGNED)
    assert is_committed(OLD, ticket, NOW_S + late_s) == (not said)
    assert is_committed(OLD, signed(MEETS), NOW_S + late_s) == (not said)
    if said:
        with pytest.raises(LocalError, match=rf"{said}.* clock .*agent '.*' is wrong"):
            OLD.check_times(ticket, now_s=NOW_S + late_s)
