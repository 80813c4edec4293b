"""A signed ticket is taken as it was signed, in its time, by who has the key; and no other is."""

import hmac
from random import Random
from typing import Any

import msgspec
import pytest

from kvbus.errors import ErrorCode, LocalError
from kvbus.protocol import CLOCK_TOLERANCE_S, Rendezvous, Ticket, TicketKeys

OLD, NEW, WRONG = (TicketKeys([letter * 32]) for letter in (b"o", b"n", b"w"))
BOTH = TicketKeys([b"n" * 32, b"o" * 32])
NOW_S, LIFETIME_S = 1_760_000_000.5, 600
UNSIGNED = Ticket(
    agent_id="agent",
    agent_boot="boot",
    endpoint="tcp://10.0.0.1:7501",
    engine_id="engine",
    engine_instance="instance",
    offer_id="offer",
    request_id="request",
    num_tokens=9,
    secret=32 * "0",
    server_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
    audience="decode",
    prompt_digest="digest",
)
SIGNED = OLD.sign(UNSIGNED, now_s=NOW_S, lifetime_s=LIFETIME_S)
OTHER_VALUES: dict[type, Any] = {str: "tcp://10.0.0.2:7501", int: 1_760_000_001}
NOT_SIGNED = {"traceparent"}
NUM_FORGED = 100_000


def is_taken(keys: TicketKeys, ticket: Ticket | Rendezvous, now_s: float = NOW_S) -> bool:
    try:
        keys.check_signature(ticket)
        keys.check_times(ticket, now_s=now_s)
    except LocalError:
        return False
    return True


def test_a_ticket_is_taken_by_who_has_its_key_and_while_keys_are_replaced() -> None:
    newer = BOTH.sign(UNSIGNED, now_s=NOW_S, lifetime_s=LIFETIME_S)

    assert is_taken(OLD, SIGNED)
    assert is_taken(BOTH, SIGNED), "signed with the key before"
    assert is_taken(NEW, newer), "the first key signs"
    assert not is_taken(OLD, newer)
    assert not is_taken(WRONG, SIGNED)


def test_a_signed_ticket_passes_through_json() -> None:
    carried = msgspec.json.decode(msgspec.json.encode(SIGNED.to_json()))

    assert is_taken(OLD, Ticket.from_json(carried | {"added_by_a_router": 1}))


@pytest.mark.parametrize("field", sorted(set(Ticket.__struct_fields__) - NOT_SIGNED))
def test_a_ticket_with_another_value_in_any_field_is_refused(field: str) -> None:
    altered = msgspec.structs.replace(SIGNED, **{field: OTHER_VALUES[type(getattr(SIGNED, field))]})

    assert not is_taken(OLD, altered)


def test_the_trace_of_a_ticket_is_not_signed() -> None:
    """Agents that do not know the field drop it, and check the rest."""
    traced = msgspec.structs.replace(SIGNED, traceparent="00-" + 32 * "a" + "-" + 16 * "b" + "-01")

    assert is_taken(OLD, traced)


def test_a_ticket_without_blocks_is_signed_as_by_agents_that_do_not_know_the_field() -> None:
    fields = {**SIGNED.to_json(), "signature": ""}
    del fields["blocks"], fields["traceparent"]

    signature = hmac.digest(32 * b"o", b"kvbus ticket\n" + msgspec.json.encode(fields), "sha256")

    assert signature.hex() == SIGNED.signature


def test_a_ticket_whose_blocks_were_taken_away_or_added_is_refused() -> None:
    with_blocks = msgspec.structs.replace(UNSIGNED, blocks="gA==")
    signed = OLD.sign(with_blocks, now_s=NOW_S, lifetime_s=LIFETIME_S)

    assert is_taken(OLD, signed)
    assert not is_taken(OLD, msgspec.structs.replace(signed, blocks=""))
    assert not is_taken(OLD, msgspec.structs.replace(SIGNED, blocks="gA=="))


def test_a_ticket_that_is_not_signed_is_refused_as_such() -> None:
    with pytest.raises(LocalError, match="is not signed") as refused:
        OLD.check_signature(UNSIGNED)

    assert refused.value.code is ErrorCode.FORBIDDEN


@pytest.mark.parametrize(
    ("late_s", "taken", "said"),
    [
        (-CLOCK_TOLERANCE_S, True, ""),
        (-CLOCK_TOLERANCE_S - 2, False, "issued 32 s in the future"),
        (LIFETIME_S + CLOCK_TOLERANCE_S - 1, True, ""),
        (LIFETIME_S + CLOCK_TOLERANCE_S + 1, False, "expired 32 s ago"),
    ],
)
def test_a_ticket_is_of_its_time_and_a_clock_that_is_off_is_said(
    late_s: float, taken: bool, said: str
) -> None:
    assert is_taken(OLD, SIGNED, NOW_S + late_s) is taken
    if not taken:
        with pytest.raises(LocalError, match=rf"{said}.* clock .*agent 'agent' is wrong"):
            OLD.check_times(SIGNED, now_s=NOW_S + late_s)


def test_none_of_many_forged_tickets_is_taken() -> None:
    random, fields = Random(1), sorted(set(Ticket.__struct_fields__) - {"kvbus", *NOT_SIGNED})
    num_taken = 0
    for number in range(NUM_FORGED):
        match number % 5:
            case 0:
                digits = f"{random.getrandbits(256):064x}"
                forged = msgspec.structs.replace(SIGNED, signature=digits)
            case 1:
                field = random.choice(fields)
                value = getattr(SIGNED, field)
                other = value + random.randint(1, 10**9) if isinstance(value, int) else f"{value}x"
                forged = msgspec.structs.replace(SIGNED, **{field: other})
            case 2:
                kept = SIGNED.signature[: random.randrange(64)]
                forged = msgspec.structs.replace(SIGNED, signature=kept)
            case 3:
                forged = WRONG.sign(UNSIGNED, now_s=NOW_S, lifetime_s=LIFETIME_S)
            case _:
                issued_at_s = NOW_S - LIFETIME_S - random.randint(32, 10**6)
                forged = OLD.sign(UNSIGNED, now_s=issued_at_s, lifetime_s=LIFETIME_S)
        num_taken += is_taken(OLD, forged)

    assert num_taken == 0


def test_a_rendezvous_is_signed_as_well_and_neither_stands_for_the_other() -> None:
    unsigned = Rendezvous(32 * "1", "tcp://10.0.0.1:7501", audience="decode")
    signed = OLD.sign(unsigned, now_s=NOW_S, lifetime_s=LIFETIME_S)
    carried = Rendezvous.from_json(msgspec.json.decode(msgspec.json.encode(signed.to_json())))

    assert is_taken(BOTH, carried)
    assert not is_taken(WRONG, carried)
    assert not is_taken(BOTH, unsigned)
    assert not is_taken(BOTH, carried, NOW_S + LIFETIME_S + CLOCK_TOLERANCE_S + 1)
    for field in Rendezvous.__struct_fields__:
        value = OTHER_VALUES[type(getattr(signed, field))]
        altered = msgspec.structs.replace(signed, **{field: value})
        assert not is_taken(BOTH, altered), field
