"""Spans go to a collector, if the configuration names one; else nothing for it is imported."""

import asyncio

from anyio.abc import TaskGroup

from kvbus.agent.otlp.outbox import READINGS, SpanOutbox
from kvbus.agent.otlp.post import Collector
from kvbus.agent.process.config import AgentConfig
from kvbus.agent.process.identity import AgentIdentity
from kvbus.agent.process.metrics import AgentMetrics
from kvbus.errors import ConfigError


def start_export(
    config: AgentConfig, identity: AgentIdentity, metrics: AgentMetrics, tasks: TaskGroup
) -> SpanOutbox | None:
    """What takes spans; None when nobody wants any. Raises `ConfigError` without kvbus[otel]."""
    if not config.otlp_endpoint:
        return None
    try:
        from kvbus.agent.otlp.sender import SpanSender  # noqa: PLC0415  # may not be installed
    except ImportError as error:
        raise ConfigError(
            f"key 'otlp_endpoint': needs a package that is not here ({error.name}): "
            "pip install 'kvbus[otel]'",
            key="otlp_endpoint",
        ) from error
    outbox = SpanOutbox()
    resource = {
        "service.name": f"kvbus-{identity.role}",
        "service.instance.id": identity.boot,
        "kvbus.agent_id": identity.agent_id,
    }
    loop = asyncio.get_running_loop()
    sender = SpanSender(
        outbox, Collector(config.otlp_endpoint), resource, loop.call_soon_threadsafe
    )
    metrics.add_readings(outbox.readings, READINGS)
    tasks.start_soon(sender.run)
    return outbox
