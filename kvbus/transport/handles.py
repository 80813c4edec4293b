"""Owns what a caller holds: a read that it can abort, and a demand for progress."""

from collections.abc import Callable


class Read:
    """A read in progress. It ends once, by the `on_end` that it was started with."""

    __slots__ = ("_abort",)

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort

    def abort(self) -> None:
        """Post nothing more; the read ends, aborted, when what was posted is terminal."""
        self._abort()


class ProgressToken:
    """Keeps progress driven until it is closed: as the target of reads, and for connections."""

    __slots__ = ("_change",)

    def __init__(self, change: Callable[[int], None]) -> None:
        self._change: Callable[[int], None] | None = change
        change(1)

    def close(self) -> None:
        """No longer need progress; a second call changes nothing."""
        change, self._change = self._change, None
        if change:
            change(-1)

    def __enter__(self) -> "ProgressToken":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
