"""How far vLLM is with requests that somebody may read while it computes them, step by step.

Refuses to call tokens ready before vLLM says that their step is done. That holds for those of its
prefix cache, too: with them it counts what other requests compute in the same step.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

BlockIds = Sequence[Sequence[int]]
"""By group, in order of position."""


class Ready(NamedTuple):
    """The first ``num_tokens`` of a request are computed; they are the first in ``block_ids``."""

    request_id: str
    num_tokens: int
    block_ids: BlockIds


@dataclass(slots=True)
class _Progress:
    """Blocks by group, and after which steps how many tokens of the prompt will be computed."""

    num_prompt_tokens: int
    block_ids: list[list[int]] = field(default_factory=list)
    planned: deque[tuple[int, int]] = field(default_factory=deque)


class Growing:
    """The requests that are being computed and may be read; for the scheduler's thread."""

    def __init__(self, select: Callable[[BlockIds], BlockIds] = tuple) -> None:
        self._select = select
        self._requests: dict[str, _Progress] = {}
        self._step = 0

    def begin(self, request_id: str, num_prompt_tokens: int) -> None:
        """Follow a request that is about to be scheduled for the first time, to its prompt's end.

        What it computes behind that is its answer, which no offer has.
        """
        self._requests.setdefault(request_id, _Progress(num_prompt_tokens))

    def end(self, request_id: str) -> None:
        """It is over, or its blocks are not its own any more."""
        self._requests.pop(request_id, None)

    def schedule(self, output: "SchedulerOutput") -> int:
        """Note what a step is going to compute; its number, 0 when nobody has to be told of it."""
        if not self._requests:
            return 0
        self._step += 1
        for new in output.scheduled_new_reqs:
            if (progress := self._requests.get(new.req_id)) is not None:
                progress.block_ids = [list(ids) for ids in self._select(new.block_ids)]
                self._plan(progress, new.num_computed_tokens, output, new.req_id)
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if (progress := self._requests.get(request_id)) is not None:
                if (more := cached.new_block_ids[index]) is not None:
                    added = self._select(more)
                    # One that was preempted and is back has no blocks here, and brings all of them.
                    known = progress.block_ids or [[] for _ in added]
                    progress.block_ids = [
                        [*ids, *new] for ids, new in zip(known, added, strict=True)
                    ]
                self._plan(progress, cached.num_computed_tokens[index], output, request_id)
        return self._step

    def done(self, step: int) -> Iterator[Ready]:
        """The step, and those before it, are computed: what is ready now."""
        for request_id, progress in self._requests.items():
            num_tokens = 0
            while progress.planned and progress.planned[0][0] <= step:
                _, num_tokens = progress.planned.popleft()
            if num_tokens:
                yield Ready(request_id, num_tokens, [list(ids) for ids in progress.block_ids])

    def _plan(
        self, progress: _Progress, num_computed: int, output: "SchedulerOutput", request_id: str
    ) -> None:
        if num_computed < progress.num_prompt_tokens:
            num_tokens = num_computed + output.num_scheduled_tokens[request_id]
            num_tokens = min(num_tokens, progress.num_prompt_tokens)
            progress.planned.append((self._step, num_tokens))
