"""Sessions of a small engine on bare sockets: attach, requests, notices. See `raw_engine`."""

import array
import math
import os
import random
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

FLAW = sys.argv[1] if len(sys.argv) > 1 else ""
ROLE, ATTACH = os.environ["KVBUS_ROLE"], os.environ["KVBUS_ATTACH"]
WINDOW, BLOCK, HEADS, DIM, BLOCKS, TP = 24, 16, 4, 8, 24, 2
GROUPS: list[dict[str, Any]] = [
    {"name": "full", "layers": [0, 2], "window": None},
    {"name": "tail", "layers": [1], "window": WINDOW},
]
ROW_BYTES, HELD = 2 * DIM, HEADS // TP
BLOCK_BYTES = 2 * BLOCK * HELD * ROW_BYTES  # parts, tokens, heads
LAYER_BYTES = BLOCKS * BLOCK_BYTES
SIZE_BYTES = 3 * LAYER_BYTES

Map = dict[str, Any]
Tokens = tuple[int, int]


def spec() -> Map:
    return {
        "engine_id": "raw",
        "model": "m",
        "tp_size": TP,
        "groups": [
            {
                **group,
                "block_size": BLOCK,
                "num_kv_heads": HEADS,
                "head_dim": DIM,
                "dtype": "bfloat16",
            }
            for group in GROUPS
        ],
    }


def rank_spec(rank: int) -> Map:
    """NHD: block, kv, token, head, dim."""
    strides = [("block", BLOCKS, BLOCK_BYTES), ("kv", 2, BLOCK_BYTES // 2)]
    strides += [("token", BLOCK, HELD * ROW_BYTES), ("head", HELD, ROW_BYTES), ("dim", DIM, 2)]
    if FLAW == "wrong_strides":
        strides[2:4] = [("token", BLOCK, ROW_BYTES), ("head", HELD, BLOCK * ROW_BYTES)]
    if FLAW == "overlap":
        strides[1] = ("kv", 2, ROW_BYTES)
    axes = [{"name": n, "size": size, "stride_bytes": stride} for n, size, stride in strides]
    regions = [
        {
            "segment_id": "kv",
            "offset_bytes": layer * LAYER_BYTES,
            "group": group["name"],
            "layers": [layer],
            "parts": ["k", "v"],
            "first_head": rank * HELD if FLAW != "wrong_heads" else 0,
            "num_heads": HELD,
            "axes": axes,
        }
        for group in GROUPS
        for layer in group["layers"]
    ]
    segments = [{"segment_id": "kv", "size_bytes": SIZE_BYTES}]
    return {"rank": rank, "segments": segments, "regions": regions}


class Session:
    """One attach connection and one DEALER."""

    def __init__(self, engine: Any, rank: int | None = None) -> None:
        self.engine, self.rank = engine, rank
        self.boot = uuid.uuid4().hex
        if FLAW == "same_boot":
            self.boot = "always" + str(rank)
        self.secret = self.boot if FLAW == "told_secret" else uuid.uuid4().hex
        self.attach = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.attach.set_inheritable(FLAW == "inherited")
        self.attach.connect(ATTACH)
        self.dealer = engine.context.socket(zmq.DEALER)
        self.dealer.set(zmq.LINGER, 0)
        self.dealer.set(zmq.RCVHWM, 0)
        self.next_id, self.agent = random.getrandbits(48), None
        self.waiting: dict[int, list[Any]] = {}
        if FLAW == "ids_from_one":
            self.next_id = 1
        if FLAW == "falling_ids":
            self.next_id = 1_000_000
        self.heard = time.monotonic()

    def call(self, op: str, body: Map, fd: int | None = None) -> Map:
        packed = msgpack.packb({"op": op, "body": body} if FLAW != "list" else [op, body])
        frame = struct.pack("<I", len(packed)) + packed
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd else []
        if FLAW == "late_descriptor" and fd:
            self.attach.sendall(frame[:4])
            frame = frame[4:]
        if FLAW == "two_descriptors" and fd:
            rights[0][2].append(fd)
        self.attach.sendmsg([frame], rights)
        length = struct.unpack("<I", self.read(4))[0]
        reply = msgpack.unpackb(self.read(length))
        if "error" in reply:
            sys.exit(f"{op} was refused: {reply['error']}")
        ok: Map = reply["ok"]
        return ok

    def read(self, num_bytes: int) -> bytes:
        read = b""
        while len(read) < num_bytes:
            chunk = self.attach.recv(num_bytes - len(read))
            if not chunk:
                raise ConnectionError
            read += chunk
        return read

    def open(self, memory: int | None = None) -> None:
        hello = {"min_protocol": 1, "max_protocol": 1, "engine_id": "raw", "boot": self.boot}
        if FLAW == "number_as_text":
            hello["min_protocol"] = "1"
        if FLAW == "no_hello" and memory is not None:
            self.call("segment", {"segment_id": "kv", "size_bytes": SIZE_BYTES}, memory)
        welcome = self.call("hello", hello)
        self.dealer.connect(welcome["engine_endpoint"])
        if memory is not None:
            size = SIZE_BYTES + (4096 if FLAW == "wrong_size" else 0)
            self.call("segment", {"segment_id": "kv", "size_bytes": size}, memory)
            if not self.rank:
                words = {"segment_id": "cells", "size_bytes": 4096, "cells": True}
                self.call("segment", words, self.engine.cells_fd)
        body = {"engine": spec()}
        if self.rank is not None:
            body["rank"] = rank_spec(self.rank)
            if FLAW == "two_engines" and self.rank:
                body["engine"]["model"] = "n"
        self.ask("register", body)

    def ask(self, op: str, body: Map, on_reply: Callable[[Map], None] | None = None) -> None:
        envelope: Map = {"v": 1, "op": op, "id": self.next_id, "boot": self.boot, "body": body}
        envelope["secret"] = uuid.uuid4().hex if FLAW == "new_secrets" else self.secret
        if FLAW == "no_version":
            envelope.pop("v")
        if FLAW == "other_boot":
            envelope["boot"] = uuid.uuid4().hex
        frame = msgpack.packb(envelope)
        if FLAW == "double_key":
            frame = bytes([frame[0] + 1]) + frame[1:] + msgpack.packb("v") + msgpack.packb(1)
        if FLAW == "text_ids" and "tables" in body:
            for table in body["tables"].values():
                table["ids"] = table["ids"].decode("latin1")
            frame = msgpack.packb(envelope)
        self.next_id += -1 if FLAW == "falling_ids" else 1
        if on_reply is not None:
            self.waiting[envelope["id"]] = [envelope, frame, time.monotonic() + 1.0, on_reply]
        self.send(frame)

    def send(self, frame: bytes) -> None:
        if FLAW == "delimiter":
            self.dealer.send(b"", zmq.SNDMORE)
        self.dealer.send(frame)

    def tick(self) -> None:
        now = time.monotonic()
        for entry in [one for one in self.waiting.values() if now >= one[2]]:
            entry[2] = math.inf
            if FLAW == "repeats":
                self.send(entry[1])
            if FLAW == "asks_again":
                entry[0]["id"], self.next_id = self.next_id, self.next_id + 1
                self.waiting[entry[0]["id"]] = entry
                self.send(msgpack.packb(entry[0]))
            if FLAW == "gives_up":
                del self.waiting[entry[0]["id"]]
        if now > self.heard + 1.0 and FLAW != "no_ping":
            self.heard = now
            self.ask("ping", {})

    def drain(self) -> None:
        while True:
            try:
                message = msgpack.unpackb(self.dealer.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            self.heard = time.monotonic()
            if self.agent not in (None, message["boot"]):
                continue
            self.agent = message["boot"]
            if "re" in message:
                self.on_reply(message)
            else:
                self.engine.on_notice(message["op"], message["body"])

    def on_reply(self, message: Map) -> None:
        if FLAW == "replies_in_order" and self.waiting:
            entry = self.waiting.pop(min(self.waiting))
        else:
            entry = self.waiting.pop(message["re"], [])
        if FLAW == "strict_fields" and entry and "a_later_field" in message:
            sys.exit("a reply with an unknown field")
        if entry:
            entry[3](message)

    def is_lost(self) -> bool:
        try:
            return self.attach.recv(1, socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self.attach.close()
        self.dealer.close()


def positions_of(group: Map, start: int, stop: int) -> Tokens:
    if group["window"] and FLAW != "no_window":
        start = max(start, stop - group["window"])
    return (start, stop) if stop > start else (start, start)


def row(name: int, layer: int, part: int, position: int, head: int) -> bytes:
    base = 101 * name + 59 * layer + 37 * part + 7 * position + 23 * head
    return bytes((base + 3 * i) % 251 for i in range(ROW_BYTES))
