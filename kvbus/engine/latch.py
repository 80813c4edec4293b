"""Something that happens once, for those who wait for it and those who want to be called."""

from collections.abc import Callable

import anyio


class Latch:
    """Not set at first, and set for good."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._calls: list[Callable[[], None]] = []

    @property
    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._event.is_set()

    def set(self) -> None:
        """It has happened: wake who waits, and make the calls. Idempotent."""
        self._event.set()
        calls, self._calls = self._calls, []
        for call in calls:
            call()

    async def wait(self) -> None:
        """Return when it has happened."""
        await self._event.wait()

    def when_set(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when it happens; at once when it has."""
        if self.is_set:
            call()
        else:
            self._calls.append(call)
