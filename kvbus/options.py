"""Options of a command, declared once as fields of a dataclass that typer reads.

A field without `typer.Option` is no option: only code can set it.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_origin

T = TypeVar("T")


def with_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    fields = inspect.signature(options).parameters.values()
    signature = inspect.Signature(
        [one for one in fields if get_origin(one.annotation) is Annotated]
    )

    def decorate(run: Callable[[T], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            run(options(**given))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = signature  # type: ignore[attr-defined]  # `inspect` reads it
        return command

    return decorate


def completed_by(values: Iterable[str]) -> Callable[[], list[str]]:
    """Let the shell complete an option that is checked by the command, not by its type."""
    known = list(dict.fromkeys(values))
    return lambda: known
