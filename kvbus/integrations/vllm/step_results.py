"""What the scheduler's side tells the workers, and these report to vLLM in their output.

Refuses to hold anything but ids: it is pickled in every step.
"""

from dataclasses import dataclass

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
)


@dataclass(frozen=True, slots=True)
class StepResults(KVConnectorMetadata):
    """Ids of requests: whose blocks were read, whose load is over, whose load has failed."""

    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerPlace(KVConnectorHandshakeMetadata):
    """Where a worker's memory is: at the agent of ``peer_endpoint``, empty while there is none."""

    rank: int
    peer_endpoint: str
