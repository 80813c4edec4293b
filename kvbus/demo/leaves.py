"""The single errors of a group, as task groups raise them.

Refuses nothing: a group in a group is opened, too.
"""

from collections.abc import Iterator

from kvbus.errors import KVBusError


def leaves(group: BaseExceptionGroup[KVBusError]) -> Iterator[KVBusError]:
    """Each error of ``group``, in order."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from leaves(error)
        else:
            yield error
