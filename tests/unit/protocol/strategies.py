"""Any value that a message may hold, by its type alone; and every class that is a message."""

from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import strategies as st
from msgspec import inspect as types

from kvbus.errors import ProtocolError
from kvbus.protocol import EVENTS, NOTICES, REQUESTS, Empty, ErrorBody, Message

KINDS = tuple(kind for kinds in REQUESTS.values() for kind in kinds.values())
OTHERS: tuple[type[Message], ...] = (*NOTICES.values(), *EVENTS.values(), Empty, ErrorBody)
MESSAGES: tuple[type[Message], ...] = tuple(
    dict.fromkeys((*KINDS, *(kind.reply for kind in KINDS), *OTHERS))
)
LETTERS = st.characters(exclude_categories=["Cs"])  # as UTF-8 can be
TEXT = st.text(LETTERS, max_size=8)
T = TypeVar("T")
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXT | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


def messages(kind: type[Message]) -> st.SearchStrategy[Any]:
    """Instances of ``kind`` with any values that its annotations allow."""
    return _values(types.type_info(kind))


def _values(of: types.Type) -> st.SearchStrategy[Any]:  # noqa: PLR0911  one return a kind of type
    match of:
        case types.StructType(cls, fields):
            return st.builds(cls, **{field.name: _values(field.type) for field in fields})
        case types.IntType():
            low, high = _bounds(of, -(2**63), 2**63 - 1)
            return st.integers(low, high) | st.sampled_from([low, high])
        case types.FloatType():
            low, high = _bounds(of, -1e300, 1e300)
            return st.floats(low, high, exclude_min=of.gt is not None)
        case types.StrType() if of.pattern:
            return st.just("tcp://10.0.0.1:7501") | st.just("tcp://[fd00::1]:1")
        case types.StrType():
            least = of.min_length or 0
            text = st.text(LETTERS, min_size=least, max_size=least + 8)
            return text | st.just("x" * (of.max_length or 4096))
        case types.BytesType():
            least = of.min_length or 0
            return st.binary(min_size=least, max_size=of.max_length or max(16, least))
        case types.EnumType(cls):
            return st.sampled_from(list(cls))
        case types.LiteralType(values):
            return st.sampled_from(values)
        case types.DictType(key, value):
            return st.dictionaries(_values(key), _values(value), max_size=2)
        case types.VarTupleType(item):
            least = of.min_length or 0
            return st.lists(_values(item), min_size=least, max_size=max(least, 2)).map(tuple)
        case types.UnionType(options):
            return st.one_of(*map(_values, options))
        case types.Metadata(inner):
            return _values(inner)
    simple = {types.BoolType: st.booleans(), types.NoneType: st.none(), types.AnyType: PLAIN}
    return simple[type(of)]


def _bounds(of: types.IntType | types.FloatType, low: float, high: float) -> tuple[Any, Any]:
    bounds = [bound for bound in (of.ge, of.gt) if bound is not None]
    tops = [bound for bound in (of.le, of.lt) if bound is not None]
    return (bounds or [low])[0], (tops or [high])[0]


def value_or_refusal(call: Callable[[], T]) -> T | ProtocolError:
    """Return the result of ``call``, or the `ProtocolError` that it raises."""
    try:
        return call()
    except ProtocolError as error:
        return error
