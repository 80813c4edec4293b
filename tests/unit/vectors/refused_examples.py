"""Frames that an agent must refuse, each with the code of the answer.

Nothing depends on what an agent holds: each is refused by an agent that was just started.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgpack

from kvbus.memory.attach import LENGTH_BYTES

BOOT = "raw-engine"
STATUS = {"v": 1, "op": "status", "id": 7, "boot": BOOT, "body": {}}
SECRET = "0" * 32
OFFER = {"agent_boot": "earlier", "offer_id": "o", "secret": SECRET}
ACQUIRE = {**OFFER, "reader_id": "r", "lease_s": 1.0}
LEASE = {"agent_boot": "b", "offer_id": "o", "epoch": 1, "token": SECRET}
HELLO = {"min_protocol": 1, "max_protocol": 1, "engine_id": "e", "boot": BOOT}
SEGMENT = {"segment_id": "kv", "size_bytes": 4096}


@dataclass(frozen=True)
class Refused:
    """One message of ``frames``, after each frame of ``before`` has got its reply.

    ``socket`` is "requests" for every socket of requests, "prefill peer", "decode peer", "attach",
    or "engine" for the engine socket before hello.
    """

    why: str
    socket: str
    code: str
    frames: tuple[bytes, ...]
    before: tuple[bytes, ...] = ()

    def vector(self) -> dict[str, Any]:
        frames = {"before": self.before, "frames": self.frames}
        hexed = {name: [frame.hex() for frame in some] for name, some in frames.items()}
        return {"why": self.why, "socket": self.socket, "code": self.code, **hexed}


def packed(fields: Any) -> bytes:
    frame: bytes = msgpack.packb(fields)
    return frame


def status(**changes: Any) -> bytes:
    """A request that is right but for ``changes``; None leaves a key out."""
    fields = {**STATUS, **changes}
    return packed({key: value for key, value in fields.items() if value is not None})


def attach(op: str, body: dict[str, Any], **changes: Any) -> bytes:
    return packed({"op": op, "body": {**body, **changes}})


NO_MESSAGES: dict[str, bytes] = {
    "an empty frame": b"",
    "no msgpack": b"\xc1\xc1\xc1",
    "a map that is cut off": status()[:-3],
    "bytes behind the map": status() + b"\x00",
    "a list": packed([1, 2]),
    "keys that are no strings": packed({1: 2}),
    "text that is no UTF-8": status(op=None)[:-1] + b"\x80\xa2op\xa2\xff\xfe",
    "an extension type": status(body={"fetch_id": msgpack.ExtType(1, b"x")}),
    "nested too deep": status(body=0)[:-1] + b"\x91" * 2_000 + b"\x90",
    "no version": status(v=None),
    "a version that is a float": status(v=1.0),
    "a version that is a bool": status(v=True),
    "an op that is empty": status(op=""),
    "an op that is too long": status(op="o" * 65),
    "an op that is bin": status(op=b"status"),
    "an id that is text": status(id="7"),
    "an id that is a float": status(id=7.0),
    "an id below 0": status(id=-1),
    "no boot id": status(boot=None),
    "a boot id that is too long": status(boot="b" * 65),
    "a body that is text": status(body="x"),
    "no body": status(body=None),
    "a reply": packed({"v": 1, "re": 7, "boot": BOOT, "ok": {}}),
    "a notice": packed({"v": 1, "op": "released", "seq": 1, "boot": BOOT, "body": {}}),
}
TWICE: dict[str, bytes] = {
    "a key that is there twice": b"\x86" + status()[1:] + packed("op") + packed("ping"),
    "a key of the body that is there twice": (
        status(body=0)[:-1] + b"\x82" + 2 * (packed("fetch_id") + packed("f"))
    ),
}
INVALID: dict[str, tuple[str, dict[str, Any]]] = {
    "a field that is missing": ("acquire", {}),
    "a number for text": ("acquire", {**ACQUIRE, "offer_id": 1}),
    "text that is empty": ("acquire", {**ACQUIRE, "offer_id": ""}),
    "text that is too long": ("acquire", {**ACQUIRE, "offer_id": "o" * 257}),
    "a duration of 0": ("acquire", {**ACQUIRE, "lease_s": 0}),
    "a duration below 0": ("acquire", {**ACQUIRE, "lease_s": -1.0}),
    "a secret that is too short": ("acquire", {**ACQUIRE, "secret": "short"}),
    "a duration that is no number": ("acquire", {**ACQUIRE, "lease_s": float("nan")}),
    "an epoch of 0": ("release", {"agent_boot": "b", "offer_id": "o", "epoch": 0}),
    "an epoch that is a float": ("release", {**LEASE, "epoch": 1.5}),
    "an epoch that is text": ("release", {**LEASE, "epoch": "one"}),
    "a handshake without its engine": ("handshake", {"min_protocol": 1}),
}
UNKNOWN: dict[str, tuple[str, dict[str, Any], str]] = {
    "a boot id of another process": ("acquire", ACQUIRE, "stale"),
    "an op of the engine socket": ("offer", {}, "unknown_op"),
    "an op that nobody has": ("make_coffee", {}, "unknown_op"),
}
FIRST, LATER = attach("hello", HELLO), attach("hello", HELLO, min_protocol=2, max_protocol=3)
ATTACH: dict[str, tuple[str, bytes, tuple[bytes, ...]]] = {
    "no msgpack": ("malformed", b"\xc1", ()),
    "a list": ("malformed", packed([1]), ()),
    "no body": ("malformed", packed({"op": "hello"}), ()),
    "an op that nobody has": ("unknown_op", attach("make_coffee", {}), ()),
    "an engine id that is a number": ("invalid", attach("hello", HELLO, engine_id=7), ()),
    "a boot id that is too long": ("invalid", attach("hello", HELLO, boot="b" * 65), ()),
    "versions that the agent does not speak": ("unsupported_version", LATER, ()),
    "a segment without its size": ("invalid", attach("segment", {"segment_id": "x"}), ()),
    "a segment before hello": ("not_registered", attach("segment", SEGMENT), ()),
    "a segment without its descriptor": ("malformed", attach("segment", SEGMENT), (FIRST,)),
    "a second hello": ("engine_conflict", FIRST, (attach("hello", HELLO, boot=f"{BOOT}-again"),)),
}


def refused() -> Iterator[Refused]:
    for why, frame in NO_MESSAGES.items():
        yield Refused(why, "requests", "malformed", (frame,))
    yield Refused("two frames", "requests", "malformed", (status(), status()))
    for why, frame in TWICE.items():
        yield Refused(why, "requests", "invalid", (frame,))
    yield Refused("another version", "requests", "unsupported_version", (status(v=2),))
    for why, (op, body) in INVALID.items():
        yield Refused(why, "prefill peer", "invalid", (status(op=op, body=body),))
    for why, (op, body, code) in UNKNOWN.items():
        yield Refused(why, "prefill peer", code, (status(op=op, body=body),))
    for op in ("acquire", "fetch"):
        yield Refused(f"'{op}' at a decode agent", "decode peer", "unknown_op", (status(op=op),))
    for op in ("register", "ready", "detach", "offer", "seal", "fetch", "cancel"):
        yield Refused(f"'{op}' before hello", "engine", "not_registered", (status(op=op),))
    for why, (code, message, before) in ATTACH.items():
        yield Refused(why, "attach", code, (_sized(message),), tuple(map(_sized, before)))
    length = (1 << 30).to_bytes(LENGTH_BYTES, "little")
    yield Refused("a length that is too large", "attach", "too_large", (length,))


def _sized(body: bytes) -> bytes:
    return len(body).to_bytes(LENGTH_BYTES, "little") + body
