"""An agent connects to the addresses that its configuration names, whatever names lead to them."""

from typing import Any

import pytest

from kvbus.bus import AllowedPeers, RequestClient, SocketOptions
from kvbus.bus import names as names_module
from kvbus.errors import ConfigError, ErrorCode, LocalError
from tests.bus.messages import Ask, Echoed, serve

pytestmark = pytest.mark.anyio


def allows(entries: list[str], endpoint: str) -> bool:
    try:
        AllowedPeers(entries).check(endpoint)
    except LocalError:
        return False
    return True


@pytest.mark.parametrize(
    ("entry", "endpoint", "allowed"),
    [
        ("10.0.0.7", "tcp://10.0.0.7:1", True),
        ("10.0.0.7", "tcp://10.0.0.8:1", False),
        ("10.1.0.0/16", "tcp://10.1.255.255:65535", True),
        ("10.1.0.0/16", "tcp://10.2.0.0:1", False),
        ("10.1.2.3/16", "tcp://10.1.0.1:1", True),
        ("10.0.0.7:7501", "tcp://10.0.0.7:7501", True),
        ("10.0.0.7:7501", "tcp://10.0.0.7:7502", False),
        ("10.0.0.0/8:7000-7999", "tcp://10.9.9.9:7999", True),
        ("10.0.0.0/8:7000-7999", "tcp://10.9.9.9:8000", False),
        ("fd00::/8", "tcp://[fd00::1]:7501", True),
        ("[fd00::/8]:7501", "tcp://[fd12::1]:7501", True),
        ("[fd00::/8]:7501", "tcp://[fd12::1]:7502", False),
        ("fd00::/8", "tcp://10.0.0.7:1", False),
        ("10.0.0.7", "tcp://[::ffff:10.0.0.7]:1", True),
        ("::/0", "tcp://[::ffff:10.0.0.7]:1", False),
        ("fe80::/10", "tcp://[fe80::1%lo]:1", True),
    ],
)
def test_an_address_is_allowed_by_its_network_and_port(entry, endpoint, allowed):
    assert allows([entry], endpoint) is allowed
    assert allows(["192.0.2.1", entry], endpoint) is allowed


@pytest.mark.parametrize(
    "entry",
    ["", "host", "host:1", "10.0.0.0/33", "10.0.0.1:x", "10.0.0.1:1-", "[fd00::1]:x", "::1]"],
)
def test_an_entry_that_is_none_is_refused_by_its_key(entry):
    with pytest.raises(ConfigError, match="'allowed_peers'") as refused:
        AllowedPeers([entry])

    assert refused.value.detail == {"key": "allowed_peers"}


def test_a_number_that_is_not_allowed_is_not_connected_to(context):
    options = SocketOptions(allowed=AllowedPeers(["10.0.0.0/8"]))

    with pytest.raises(LocalError, match=r"127\.0\.0\.1:1 is not in 'allowed_peers'"):
        RequestClient(context, "tcp://127.0.0.1:1", boot="b", options=options)


@pytest.mark.parametrize(("entry", "allowed"), [("127.0.0.1", True), ("127.0.0.2", False)])
async def test_a_name_is_looked_at_by_the_number_that_it_leads_to(
    context, running, monkeypatch, entry, allowed
):
    monkeypatch.setattr(names_module.NAMES, "lookup", lambda _: "127.0.0.1")
    monkeypatch.setattr(names_module.NAMES, "_kept", {})
    server = serve(context, "tcp://127.0.0.1:0")
    options = SocketOptions(allowed=AllowedPeers([entry]))
    endpoint = f"tcp://agent.example:{server.endpoint.rpartition(':')[2]}"
    client = RequestClient(context, endpoint, boot="b", options=options)

    async with running(server, client):
        outcome: Any = None
        try:
            outcome = await client.ask(Ask(number=1), timeout_s=20.0)
        except LocalError as error:
            outcome = error.code

    assert outcome == (Echoed(number=1) if allowed else ErrorCode.FORBIDDEN)
