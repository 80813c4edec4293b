"""A peer whose frames decode and lie: fields as their types allow, and names of others.

Refuses to be clever: it draws at random, from a seed, and knows nothing of what an agent does.
"""

import random
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgpack
import zmq
from msgspec import inspect as types

from kvbus.protocol import Request
from tests.plain_sockets import Curve, apply

Known = Mapping[str, Sequence[Any]]
"""By name of a field: values that are true of somebody."""

WINDOW = 64
"""Requests that wait for their reply at the same time."""
ENDED_WITHIN_S = 300.0


@dataclass
class Lies:
    """Bodies of one class of request."""

    kinds: Sequence[type[Request[Any]]]
    known: Known
    seed: int

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        rng = random.Random(self.seed)
        shapes = {kind: types.type_info(kind) for kind in self.kinds}
        while True:
            kind = rng.choice(self.kinds)
            yield kind.op, self._value(rng, shapes[kind])

    def _value(self, rng: random.Random, of: Any, name: str = "") -> Any:  # noqa: PLR0911, PLR0912  one return a kind of type
        if name in self.known and rng.random() < 0.8:
            return rng.choice(self.known[name])
        match of:
            case types.StructType(fields=fields):
                return {
                    each.encode_name: self._value(rng, each.type, each.encode_name)
                    for each in fields
                    if each.required or rng.random() < 0.7
                }
            case types.IntType():
                low = of.ge if of.ge is not None else -(2**63)
                high = of.le if of.le is not None else 2**63 - 1
                return rng.choice((low, high, rng.randint(low, high), min(high, max(low, 1))))
            case types.FloatType():
                return rng.choice((1e-3, 1.0, 86_400.0))
            case types.StrType():
                if of.pattern:
                    return "tcp://127.0.0.1:1"
                return "x" * min(of.max_length or 32, max(of.min_length or 0, rng.choice((1, 32))))
            case types.BytesType():
                return rng.randbytes(4 * rng.randint(0, 4))
            case types.EnumType(cls=cls):
                return rng.choice(list(cls)).value
            case types.LiteralType(values=values):
                return rng.choice(values)
            case types.DictType(key_type=key, value_type=value):
                num = rng.randint(0, 2)
                return {self._value(rng, key): self._value(rng, value) for _ in range(num)}
            case types.VarTupleType(item_type=item):
                num = max(of.min_length or 0, rng.randint(0, 2))
                return [self._value(rng, item) for _ in range(num)]
            case types.UnionType(types=options):
                return self._value(rng, rng.choice(options))
            case types.Metadata(type=inner):
                return self._value(rng, inner)
            case types.BoolType():
                return rng.random() < 0.5
            case types.NoneType():
                return None
        return {}


@dataclass
class Liar:
    """Sends ``num`` lies to an endpoint; counts what each was answered, by code, "ok" for yes."""

    endpoint: str
    lies: Lies
    num: int
    curve: Curve | None = None
    boot: str = field(default_factory=lambda: uuid.uuid4().hex)
    answers: Counter[str] = field(default_factory=Counter)
    accepted: set[str] = field(default_factory=set)
    twice: int = 0

    def run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVTIMEO, 60_000)
            apply(dealer, self.curve)
            dealer.connect(self.endpoint)
            self._exchange(dealer)

    def _exchange(self, dealer: "zmq.Socket[bytes]") -> None:
        waiting = dict[int, str]()
        for number, (op, body) in zip(range(1, self.num + 1), self.lies, strict=False):
            fields = {"v": 1, "op": op, "id": number, "boot": self.boot, "body": body}
            waiting[number] = op
            dealer.send(msgpack.packb(fields))
            while len(waiting) >= WINDOW:
                self._note(msgpack.unpackb(dealer.recv()), waiting)
        while waiting:
            self._note(msgpack.unpackb(dealer.recv()), waiting)
        self.twice += int(bool(dealer.poll(0)))

    def _note(self, reply: dict[str, Any], waiting: dict[int, str]) -> None:
        op = waiting.pop(reply["re"], None)
        if op is None:
            self.twice += 1
        elif "ok" in reply:
            self.answers["ok"] += 1
            self.accepted.add(op)
        else:
            self.answers[reply["error"]["code"]] += 1


@contextmanager
def lying(*liars: Liar) -> Iterator[None]:
    """They lie, each in a thread, until they have no more to say."""
    threads = [threading.Thread(target=liar.run) for liar in liars]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for thread in threads:
            thread.join(ENDED_WITHIN_S)
            assert not thread.is_alive()
