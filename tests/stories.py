"""Worlds whose failures tell the story of every entry of their tables."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine

from kvbus.table import Table


class StoryMachine(RuleBasedStateMachine):
    """A state machine around sans-IO tables."""

    def tables(self) -> tuple[Table[Any, Any, Any, Any], ...]:
        """The tables as they are now."""
        raise NotImplementedError

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An error that leaves this context says what each entry has been through."""
        try:
            yield
        except Exception as error:
            for table in self.tables():
                for key in (*table.retired, *table.live):
                    error.add_note("\n".join([f"story of {key}:", *table.story(key)]))
            raise

    def check_invariants(self, *args: Any, **more: Any) -> None:
        with self.telling():
            super().check_invariants(*args, **more)
