"""Says whether the host that an agent tells others to use is one of this machine."""

from collections.abc import Iterator

import psutil

from kvbus.doctor.finding import OK, WARNING, Finding
from kvbus.doctor.names import address_of
from kvbus.errors import KVBusError


def advertise_error(host: str) -> str:
    """Why others might not reach this machine by ``host``; empty when they should, or it is none.

    Takes a few seconds where the name server is silent.
    """
    if not host:
        return ""
    try:
        address = address_of(host)
    except KVBusError as error:
        return error.message
    ours = {
        one.address.partition("%")[0] for each in psutil.net_if_addrs().values() for one in each
    }
    return "" if address in ours else f"{address} is no address of this machine"


def advertise_findings(agent_id: str, host: str, error: str) -> Iterator[Finding]:
    """One for an agent that has an ``advertise_host``."""
    if host:
        yield Finding(
            f"agents.{agent_id}.advertise_host",
            WARNING if error else OK,
            f"'{host}': {error}" if error else f"others are told '{host}'",
            {"advertise_host": host, "error": error},
            why="Tickets carry it. Unless it leads here by a NAT or a proxy nobody reaches the "
            "agent, and fetches fail with peer_unreachable.",
            fix="Set advertise_host to the address by which other machines reach this one, and "
            "look from one of them: kvbus doctor --only peer --peer tcp://HOST:PORT.",
            command="ip -brief address",
        )
