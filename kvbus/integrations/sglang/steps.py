"""Steps of SGLang's scheduler, numbered alike in all ranks of an engine.

scheduler   launch step 7, record 7 │ launch step 8, record 8 │ result of 7: seal, after 7
GPU           ───── step 7 ─────────▶ 7 ─────── step 8 ───────▶ 8
"""

from typing import Any

from kvbus.engine import Link
from kvbus.protocol.engine import NUM_SEQUENCE_WORDS

ATTRIBUTE = "kvbus_steps"
"""Attribute of SGLang's scheduler that holds its `LaunchedSteps`."""


class LaunchedSteps:
    def __init__(self, link: Link, scheduler: Any) -> None:
        self._link, self._scheduler = link, scheduler
        self._has_own_stream = scheduler is not None and (
            getattr(scheduler, "enable_overlap", False) or _num_stages(scheduler) > 1
        )
        self.launched = 0
        """The last launched step; SGLang's count is ahead while it launches one."""
        self._resolved = 0

    @property
    def written(self) -> int:
        """Number of the step that wrote the last pages whose result SGLang processes."""
        return (self._resolved or self.launched) * NUM_SEQUENCE_WORDS

    @property
    def in_flight(self) -> int:
        """Number of the last step that may use pages which SGLang has freed."""
        return self.launched * NUM_SEQUENCE_WORDS

    def launch(self) -> None:
        """Record the step that was just launched."""
        self.launched = self._scheduler.forward_ct
        stream = self._scheduler.forward_stream if self._has_own_stream else None
        self._link.record(self.launched * NUM_SEQUENCE_WORDS, stream=stream)

    def resolve(self, batch: Any) -> None:
        """Note the step whose result SGLang processes; None afterwards."""
        self._resolved = batch.forward_iter if batch is not None else 0


def run_batch(original: Any, scheduler: Any, *rest: Any, **named: Any) -> Any:
    result = original(scheduler, *rest, **named)
    if (steps := getattr(scheduler, ATTRIBUTE, None)) is not None:
        steps.launch()
    return result


def process_result(original: Any, scheduler: Any, batch: Any, *rest: Any, **named: Any) -> Any:
    steps = getattr(scheduler, ATTRIBUTE, None)
    if steps is None:
        return original(scheduler, batch, *rest, **named)
    steps.resolve(batch)
    try:
        return original(scheduler, batch, *rest, **named)
    finally:
        steps.resolve(None)


def _num_stages(scheduler: Any) -> int:
    return int(getattr(getattr(scheduler, "server_args", None), "pp_size", 1))
