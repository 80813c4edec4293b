"""Writes the frames of ``minimal-engine.md``: ``python docs/generate_frames.py``.

The messages are those of ``examples/c``, with required fields only, as the codec encodes them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from kvbus.geometry import BlockTable
from kvbus.memory.attach import LENGTH_BYTES, encode_frame
from kvbus.protocol import REQUESTS, Socket, encode_request, from_body
from kvbus.protocol.ticket import Ticket

PAGE = Path(__file__).parent / "minimal-engine.md"
BOOT, SECRET = "16fd2706e8baf433b821a2a3d6a4c1d5", "5d1c4a6d3a2a128b334fab8e6072df61"
AGENT_BOOT = "0f8fad5bd9cb469fa16570867728950e"
FIRST_ID = 8124
BYTES_A_LINE = 16
NUM_BLOCKS, LAYERS, PARTS, HEADS, DIM, ITEM_BYTES = 32, [0, 1], ["k", "v"], 2, 8, 2
AXES = {"block": NUM_BLOCKS, "layer": 2, "kv": 2, "token": 16, "head": HEADS, "dim": DIM}


class Line(NamedTuple):
    """Bytes of a frame, what they mean, and how deep they lie in it; ``shown`` limits the bytes."""

    data: bytes
    text: str
    depth: int
    shown: int | None = None


def page(text: str) -> str:
    """Return the page with new frames between its markers."""
    for name, block in blocks().items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise LookupError(f"{PAGE.name} has no place for '{name}'")
        text = f"{before}{begin}\n\n{block}\n\n{end}{after}"
    return text


def blocks() -> dict[str, str]:
    """Return each frame by its operation, with its reply."""
    answers = {op: json.dumps(one, ensure_ascii=False) for op, one in replies().items()}
    return {
        op: f"{_drawn(lines)}\n\nThe reply:\n\n```json\n{answers[op]}\n```"
        for op, lines in {"segment": attach_lines(), **frames()}.items()
    }


def attach_lines() -> list[Line]:
    body = _checked(Socket.ATTACH, "segment", {"segment_id": "kv", "size_bytes": _segment_bytes()})
    frame = encode_frame({"op": "segment", "body": body})
    length = Line(frame[:LENGTH_BYTES], f"{len(frame) - LENGTH_BYTES} bytes follow", 0)
    return [length, *_lines({"op": "segment", "body": body})]


def frames() -> dict[str, list[Line]]:
    messages = {
        "register": (Socket.ENGINE, {"engine": _engine(), "rank": _rank()}),
        "offer": (
            Socket.PREFILL,
            {"request_id": "7", "num_tokens": 40, "tables": _tables(7, 3, 9)},
        ),
        "fetch": (
            Socket.DECODE,
            {"fetch_id": "f1", "num_tokens": 40, "tables": _tables(4, 5), "ticket": _ticket()},
        ),
    }
    return {
        op: list(_lines(_request(op, FIRST_ID + number, _checked(socket, op, body))))
        for number, (op, (socket, body)) in enumerate(messages.items())
    }


def replies() -> dict[str, dict[str, Any]]:
    fetched = {"fetch_id": "f1", "request_id": "7", "outcome": "completed", "stage": "completed"}
    bodies: dict[str, tuple[Socket, dict[str, Any]]] = {
        "register": (Socket.ENGINE, {}),
        "offer": (
            Socket.PREFILL,
            {"offer_id": "o1", "ticket": {"agent_id": "prefill-0", "…": "…"}},
        ),
        "fetch": (Socket.DECODE, {**fetched, "blocks_free": True}),
    }
    for op, (socket, body) in bodies.items():
        from_body(REQUESTS[socket][op].reply, body)
    return {"segment": {"ok": {"sealed": True}}} | {
        op: {"v": 1, "re": FIRST_ID + number, "boot": AGENT_BOOT, "ok": body}
        for number, (op, (_, body)) in enumerate(bodies.items())
    }


def _request(op: str, number: int, body: dict[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = msgpack.unpackb(encode_request(op, number, BOOT, body, secret=SECRET))
    return message


def _checked(socket: Socket, op: str, body: dict[str, Any]) -> dict[str, Any]:
    from_body(REQUESTS[socket][op], body)
    return body


def _lines(value: Any, label: str = "", key: bytes = b"", depth: int = 0) -> Iterator[Line]:
    """Yield a line for each scalar, each flat list or map, and each head of a nested one."""
    packer = msgpack.Packer()
    if isinstance(value, dict) and label == "ticket":
        data = key + msgpack.packb(value)
        text = f"map of {len(value)}, {len(data)} bytes in all: the ticket as the offer returned it"
        yield Line(data, text, depth, BYTES_A_LINE)
    elif _is_flat(value):
        data = key + msgpack.packb(value)
        yield Line(data, f"{label}: {_shown(value)}" if label else _shown(value), depth)
    elif isinstance(value, dict):
        yield Line(
            key + packer.pack_map_header(len(value)), f"{label}: {{" if label else "{", depth
        )
        for name, one in value.items():
            yield from _lines(one, name, msgpack.packb(name), depth + 1)
    else:
        yield Line(key + packer.pack_array_header(len(value)), f"{label}: [", depth)
        for one in value:
            yield from _lines(one, "", b"", depth + 1)


def _is_flat(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value) and all(not isinstance(one, dict | list) for one in value.values())
    return not isinstance(value, list) or all(not isinstance(one, dict) for one in value)


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"{len(value)} bytes {value.hex(' ', 4)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_shown(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def _drawn(lines: list[Line]) -> str:
    drawn = ["```text"]
    for data, text, depth, shown in lines:
        hexes = [
            data[at : at + BYTES_A_LINE].hex() for at in range(0, shown or len(data), BYTES_A_LINE)
        ]
        hexes[-1] += "…" if shown else ""
        width = 2 * BYTES_A_LINE + 2
        drawn += [f"{hexes[0]:{width}}{'  ' * depth}{text}", *hexes[1:]]
    return "\n".join([*drawn, "```"])


def _tables(*ids: int) -> dict[str, Any]:
    return {"full": {"ids": BlockTable.of(ids).ids}}


def _strides() -> dict[str, int]:
    strides, at = {}, ITEM_BYTES
    for name, size in reversed(AXES.items()):
        strides[name], at = at, at * size
    return strides


def _segment_bytes() -> int:
    return NUM_BLOCKS * _strides()["block"]


def _engine() -> dict[str, Any]:
    group = {"name": "full", "layers": LAYERS, "block_size": AXES["token"], "num_kv_heads": HEADS}
    group |= {"head_dim": DIM, "dtype": "float16"}
    return {"engine_id": "c-prefill", "model": "known numbers", "tp_size": 1, "groups": [group]}


def _rank() -> dict[str, Any]:
    strides = _strides()
    axes = [{"name": one, "size": AXES[one], "stride_bytes": strides[one]} for one in AXES]
    region = {"segment_id": "kv", "offset_bytes": 0, "group": "full", "layers": LAYERS}
    region |= {"parts": PARTS, "first_head": 0, "num_heads": HEADS, "axes": axes}
    segment = {"segment_id": "kv", "size_bytes": _segment_bytes()}
    return {"rank": 0, "segments": [segment], "regions": [region]}


def _ticket() -> dict[str, Any]:
    ticket = Ticket(
        agent_id="prefill-0",
        agent_boot=AGENT_BOOT,
        endpoint="tcp://10.0.0.1:7501",
        engine_id="c-prefill",
        engine_instance="4f9d2f1c7b6e4a0f9a3c5e8d7b1a2c3d",
        offer_id="o1",
        request_id="7",
        num_tokens=40,
        secret="b1946ac92492d2347c6235b4d2611184",
    )
    return ticket.to_json()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
