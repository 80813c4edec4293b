"""The process of an agent: transport up, runtime running, everything given back at the end."""

import asyncio
import gc
import os
import signal
import sys
from typing import Any

import anyio
import structlog

from kvbus.agent.access import Access
from kvbus.agent.config import CLOSES_WITHIN_S, AgentConfig
from kvbus.agent.data_plane import (
    choose_interfaces,
    has_rdma,
    is_one_machine,
    open_ucx,
    restrict_ucx,
)
from kvbus.agent.runtime import Runtime, ServiceFactory
from kvbus.agent.slots import StagingDevices
from kvbus.bus import new_context
from kvbus.protocol.engine import AgentRole
from kvbus.transport import Transport, TransportLimits

log = structlog.get_logger()

HERE_BYTES = 256 << 10
"""READs up to this are posted by the event loop."""


async def run_agent(
    role: AgentRole,
    config: AgentConfig,
    boot: str,
    make_service: ServiceFactory,
) -> None:
    """Run an agent until SIGTERM or SIGINT; raises `ConfigError` when it cannot start."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_loop_failure)
    access = Access.open(config)
    interfaces = choose_interfaces(config)
    restrict_ucx(interfaces, config.data_ports)
    transport = _make_transport(config, boot, loop, nic_writes=has_rdma(interfaces))
    await asyncio.wrap_future(transport.start(opens=False))
    if not is_one_machine(config):
        await open_ucx(transport, interfaces)
    try:
        with (
            anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals,
            new_context() as context,
        ):
            staging = await StagingDevices.open(config, transport)
            async with anyio.create_task_group() as tasks:
                runtime = Runtime(
                    role,
                    config,
                    boot,
                    config.runtime_path,
                    transport,
                    tasks,
                    staging,
                    interfaces,
                    access=access,
                )
                runtime.bus_errors.install()  # until the process ends; UCX has its handler by now
                await runtime.start(context, make_service)
                _settle_interpreter()
                await runtime.stop_when_told(signals)
                tasks.cancel_scope.cancel()
    finally:
        closing = transport.close(timeout_s=CLOSES_WITHIN_S)
        with anyio.CancelScope(shield=True):
            report = await asyncio.wrap_future(closing)
        if report.num_handles:
            log.warning("transport.handles_left", num_handles=report.num_handles)
        log.info("agent.stopped")


def _make_transport(
    config: AgentConfig, boot: str, loop: asyncio.AbstractEventLoop, *, nic_writes: bool
) -> Transport:
    return Transport(
        f"{config.agent_id}/{boot}",
        limits=TransportLimits(
            slice_bytes=config.slice_bytes,
            here_bytes=HERE_BYTES,
        ),
        deliver=loop.call_soon_threadsafe,
        on_broken=_end_broken,
        nic_writes=nic_writes,
    )


def _end_broken(error: Exception) -> None:
    """Without its transport an agent can neither read nor be read: let a supervisor start anew."""
    log.critical("transport.broken", exc_info=error)
    os._exit(1)


def _settle_interpreter() -> None:
    """Keep the interpreter out of the way of a handoff, once everything is imported.

    Measured at 1,400 handoffs a second: collections that walk the imported modules pause the loop
    for up to 150 ms; without them the p99 falls from 170 to 65 ms. The switch interval is how long
    a busy loop may keep the transport's thread from posting; 5 ms by default.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 1_000)
    sys.setswitchinterval(0.0005)


def _log_loop_failure(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback failed: the log says so in its own form, and the loop goes on."""
    log.error("loop.failed", reason=context["message"], exc_info=context.get("exception"))
