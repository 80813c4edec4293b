"""The connector, which also writes down when vLLM calls it and when a load has ended.

Each line has what happened, when the call began and when it returned, by `time.monotonic`, the
clock of the agents' spans. There is one request at a time.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvbus.integrations.vllm import connector

from .own_part import BEGUN, HEARD, NOTED, PUBLISHED, STAMPS, TOLD


class KvbusConnector(connector.KvbusConnector):
    """With a stamp for each call that a handover waits for."""

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        (link,) = self._control_links
        fetch = link.fetch

        def stamped(*args: Any, **options: Any) -> Any:
            begun = fetch(*args, **options)
            begun.ended.then(lambda: _write(HEARD, time.monotonic()))
            return begun

        setattr(link, "fetch", stamped)  # noqa: B010 - mypy takes no method for a variable

    def on_new_request(self, request: Any) -> None:
        with _stamped(NOTED):
            super().on_new_request(request)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        with _stamped(BEGUN if num_external_tokens else ""):
            super().update_state_after_alloc(request, blocks, num_external_tokens)

    def update_connector_output(self, connector_output: Any) -> None:
        start_s = time.monotonic()
        super().update_connector_output(connector_output)
        if connector_output.finished_recving:
            _write(TOLD, start_s)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        with _stamped(PUBLISHED):
            return super().request_finished_all_groups(request, block_ids)


@contextmanager
def _stamped(what: str) -> Iterator[None]:
    start_s = time.monotonic()
    yield
    if what:
        _write(what, start_s)


def _write(what: str, start_s: float) -> None:
    """One write a line: several processes and threads append."""
    line = f"{what} {start_s} {time.monotonic()}\n"
    file = os.open(os.environ[STAMPS], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(file, line.encode())
    os.close(file)
