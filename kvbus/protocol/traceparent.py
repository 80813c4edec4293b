"""The trace that a request belongs to, as W3C Trace Context names it: 00-TRACE-PARENT-FLAGS.

What is not of this form is no trace; it is never an error.
"""

import re
from dataclasses import dataclass

_FORM = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True, slots=True)
class TraceParent:
    """The trace, the span that what we do is a part of, and whether somebody wants to see it."""

    trace_id: str
    span_id: str
    sampled: bool

    @classmethod
    def read(cls, text: str) -> "TraceParent | None":
        """What ``text`` says; None when it is no trace."""
        found = _FORM.fullmatch(text)
        if found is None:
            return None
        trace_id, span_id, flags = found.groups()
        if not (int(trace_id, 16) and int(span_id, 16)):
            return None
        return cls(trace_id, span_id, bool(int(flags, 16) & _SAMPLED))

    @classmethod
    def first_of(cls, *texts: str) -> "TraceParent | None":
        """The first of ``texts`` that is a trace."""
        read = (cls.read(text) for text in texts if text)
        return next((one for one in read if one is not None), None)


def known_trace(*texts: str) -> str:
    """The first of ``texts`` that is a trace; empty when none is."""
    return next((text for text in texts if text and TraceParent.read(text) is not None), "")


def trace_attributes(*texts: str) -> dict[str, str]:
    """What a span says of the first of ``texts`` that is a trace."""
    text = known_trace(*texts)
    return {"traceparent": text} if text else {}
