"""The state of an agent, for systemd: the datagrams of `sd_notify(3)`.

start ── READY=1 ── WATCHDOG=1, again and again ── STOPPING=1 ── end
"""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import anyio
import structlog

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Supervisor:
    """``address`` is empty if nobody supervises the agent."""

    address: str = ""
    watchdog_s: float = 0.0
    """Time after which systemd ends a service that sends nothing; 0 for none."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> "Supervisor":
        address = environment.get("NOTIFY_SOCKET", "")
        watched = environment.get("WATCHDOG_PID", "") in ("", str(os.getpid()))
        microseconds = environment.get("WATCHDOG_USEC", "") if watched else ""
        return cls(address, int(microseconds) / 1e6 if microseconds.isdigit() else 0.0)

    def notify(self, state: str) -> None:
        """Send a state such as ``READY=1``. An error is logged: the agent works without."""
        if not self.address:
            return
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(state.encode(), address)
        except OSError as error:
            log.warning("supervisor.silent", state=state, reason=str(error))

    async def watch(self) -> None:
        """Show that the event loop runs, twice in each period."""
        while self.address and self.watchdog_s:
            self.notify("WATCHDOG=1")
            await anyio.sleep(self.watchdog_s / 2)
