"""Options of a command, declared once as fields of a dataclass that typer reads.

@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    width: Annotated[int, typer.Option(min=1, help="In pixels.")] = 80
    margin: int = 2            no option: only code can set it

@with_options(DrawOptions)
def draw(options: DrawOptions) -> None:
    '''The help of the command.'''
"""

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, get_origin

T = TypeVar("T")


def with_options(options: type[T]) -> Callable[[Callable[[T], None]], Callable[..., None]]:
    """Turn a function of ``options`` into a command for `typer.Typer.command`."""
    fields = inspect.signature(options).parameters.values()
    signature = inspect.Signature(
        [one for one in fields if get_origin(one.annotation) is Annotated]
    )

    def decorate(run: Callable[[T], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            run(options(**given))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        command.__signature__ = signature  # type: ignore[attr-defined]  # `inspect` looks for it
        return command

    return decorate
