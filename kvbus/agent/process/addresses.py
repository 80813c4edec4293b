"""The TCP addresses of an agent's configuration: what they may be, and how others reach them.

Refuses what ZeroMQ would read as something else.
"""

from kvbus.errors import ConfigError

BINDS = ("peer_bind", "events_bind")
"""The keys of addresses that ZeroMQ binds."""
MAX_PORT = 65_535


def bind_host(address: str) -> str:
    """The host of tcp://HOST:PORT, with the brackets of an IPv6 address."""
    return address.removeprefix("tcp://").rpartition(":")[0]


def advertised(host: str, endpoint: str) -> str:
    """The endpoint as others reach it, by ``host`` if that is given."""
    return f"tcp://{host}:{endpoint.rpartition(':')[2]}" if host else endpoint


def check_address(address: str, *, key: str, source: str, is_named: bool) -> None:
    """Raise `ConfigError` unless the address can be bound, and others can be told of it."""
    host, ports = bind_host(address), address.rpartition(":")[2].split("-")
    if not address.startswith("tcp://") or not host or not _are_ports(ports):
        raise ConfigError(
            f"{source}: key '{key}': '{address}' is neither tcp://HOST:PORT nor "
            f"tcp://HOST:FIRST-LAST, with ports up to {MAX_PORT}",
            key=key,
        )
    if host in ("*", "0.0.0.0", "[::]") and not is_named:  # noqa: S104 - compared
        raise ConfigError(
            f"{source}: key 'advertise_host': needed, because {key} binds every interface",
            key="advertise_host",
        )


def http_address(bind: str) -> tuple[str, int]:
    """The host, without brackets, and the port of a checked HOST:PORT."""
    host, _, port = bind.rpartition(":")
    return host.strip("[]"), int(port)


def check_http_address(bind: str, *, source: str) -> None:
    """Raise `ConfigError` unless it is HOST:PORT."""
    host, _, port = bind.rpartition(":")
    if not host or not _are_ports([port]):
        message = (
            f"{source}: key 'http_bind': '{bind}' is not HOST:PORT, with a port up to {MAX_PORT}"
        )
        raise ConfigError(message, key="http_bind")


def check_room_beside(address: str, *, key: str) -> None:
    """Raise `ConfigError` unless two agents can have the address, with a port each."""
    ports = address.rpartition(":")[2]
    if ports == "0" or "-" in ports:
        return
    port = int(ports)
    example = f"{address}-{port + 1}" if port < MAX_PORT else "tcp://HOST:7701-7702"
    raise ConfigError(
        f"key '{key}': --replace needs a range of ports, such as {example}, or port 0: an agent "
        "that is replaced has its port until it ends",
        key=key,
    )


def _are_ports(ports: list[str]) -> bool:
    """Whether these are one port, or the first and the last of some."""
    if not all(port.isascii() and port.isdigit() and int(port) <= MAX_PORT for port in ports):
        return False  # ZeroMQ would wrap a larger one
    return len(ports) == 1 or (len(ports) == 2 and 0 < int(ports[0]) <= int(ports[1]))
