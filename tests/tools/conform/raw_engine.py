"""A small prefill engine on bare sockets; `test_engines` plants flaws that the SDK does not allow.

KVBUS_ATTACH=... python -m tests.tools.conform.raw_engine

The protocol page is all that it knows; its offers do not grow.
"""

import array
import fcntl
import json
import mmap
import os
import random
import socket
import struct
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack
import zmq

BLOCK, HEADS, DIM, BLOCKS, TP = 16, 4, 8, 24, 2
GROUP: dict[str, Any] = {"name": "full", "layers": [0], "window": None}
GROUP |= {"block_size": BLOCK, "num_kv_heads": HEADS, "head_dim": DIM, "dtype": "bfloat16"}
SPEC = {"engine_id": "raw", "model": "m", "tp_size": TP, "groups": [GROUP]}
ROW_BYTES, HELD = 2 * DIM, HEADS // TP
BLOCK_BYTES = 2 * BLOCK * HELD * ROW_BYTES  # parts, tokens, heads
SIZE_BYTES = BLOCKS * BLOCK_BYTES
CELLS = {"segment_id": "cells", "size_bytes": 4096, "kind": "cells"}

Map = dict[str, Any]


def rank_spec(rank: int) -> Map:
    """NHD: block, kv, token, head, dim."""
    strides = [("block", BLOCKS, BLOCK_BYTES), ("kv", 2, BLOCK_BYTES // 2)]
    strides += [("token", BLOCK, HELD * ROW_BYTES), ("head", HELD, ROW_BYTES), ("dim", DIM, 2)]
    axes = [{"name": n, "size": size, "stride_bytes": stride} for n, size, stride in strides]
    region = {"segment_id": "kv", "offset_bytes": 0, "group": "full", "layers": [0], "axes": axes}
    region |= {"parts": ["k", "v"], "first_head": rank * HELD, "num_heads": HELD}
    segments = [{"segment_id": "kv", "size_bytes": SIZE_BYTES}]
    return {"rank": rank, "segments": segments, "regions": [region]}


def sealed_memory(num_bytes: int) -> int:
    fd = os.memfd_create("kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, num_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return fd


def tell(*words: object) -> None:
    print(*words, flush=True)


class Session:
    def __init__(self, engine: "Engine", rank: int | None = None) -> None:
        self.engine, self.rank = engine, rank
        self.boot, self.secret = uuid.uuid4().hex, uuid.uuid4().hex
        self.attach = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.attach.connect(os.environ["KVBUS_ATTACH"])
        self.dealer = engine.context.socket(zmq.DEALER)
        self.dealer.set(zmq.LINGER, 0)
        self.dealer.set(zmq.RCVHWM, 0)
        self.next_id, self.agent = random.getrandbits(48), None
        self.waiting: dict[int, tuple[bytes, Callable[[Map], None]]] = {}
        self.heard = time.monotonic()

    def call(self, op: str, body: Map, fd: int | None = None) -> Map:
        request = msgpack.packb({"op": op, "body": body})
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))] if fd else []
        self.attach.sendmsg([struct.pack("<I", len(request)) + request], rights)
        reply = msgpack.unpackb(self.read(struct.unpack("<I", self.read(4))[0]))
        if "error" in reply:
            sys.exit(f"{op} was refused: {reply['error']}")
        ok: Map = reply["ok"]
        return ok

    def read(self, num_bytes: int) -> bytes:
        read = b""
        while len(read) < num_bytes:
            if not (chunk := self.attach.recv(num_bytes - len(read))):
                raise ConnectionError
            read += chunk
        return read

    def open(self, memory: int | None = None) -> None:
        hello = {"min_protocol": 1, "max_protocol": 1, "engine_id": "raw", "boot": self.boot}
        self.dealer.connect(self.call("hello", hello)["engine_endpoint"])
        if memory is not None:
            self.call("segment", {"segment_id": "kv", "size_bytes": SIZE_BYTES}, memory)
            if not self.rank:
                self.call("segment", CELLS, self.engine.cells_fd)
        body: Map = {"engine": SPEC}
        if self.rank is not None:
            body["rank"] = rank_spec(self.rank)
        self.ask("register", body)

    def ask(self, op: str, body: Map, on_reply: Callable[[Map], None] | None = None) -> None:
        number, self.next_id = self.next_id, self.next_id + 1
        whose = {"boot": self.boot, "secret": self.secret}
        frame = msgpack.packb({"v": 1, "op": op, "id": number, "body": body, **whose})
        if on_reply is not None:
            self.waiting[number] = frame, on_reply
        self.dealer.send(frame)

    def tick(self) -> None:
        if time.monotonic() > self.heard + 1.0:
            self.heard = time.monotonic()
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
            if "re" not in message:
                self.engine.on_notice(message["op"], message["body"])
            elif entry := self.waiting.pop(message["re"], None):
                entry[1](message)

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


class Engine:
    """One control session, TP memory sessions, and a cache of BLOCKS blocks."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.cells_fd = sealed_memory(4096)
        self.cells = memoryview(mmap.mmap(self.cells_fd, 4096)).cast("Q")
        self.num_cells = 0
        self.offers: dict[str, Map] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.rest = b""
        self.reset()

    def reset(self) -> None:
        self.unused, self.sessions = deque(range(BLOCKS)), list[Session]()

    def attach(self) -> None:
        """Register with the agent, each time with new memory: an agent may still write the old."""
        fds = [sealed_memory(SIZE_BYTES) for _ in range(TP)]
        self.maps = [mmap.mmap(fd, SIZE_BYTES) for fd in fds]
        self.reset()
        while True:
            try:
                for rank, fd in enumerate(fds):
                    self.sessions.append(Session(self, rank))
                    self.sessions[-1].open(fd)
                self.control = Session(self)
                self.sessions.append(self.control)
                self.control.open()
                return
            except OSError:
                for session in self.sessions:
                    session.close()
                self.reset()
                time.sleep(0.05)

    def run(self) -> None:
        os.set_blocking(0, False)
        self.attach()
        while self.step():
            pass
        sys.exit(0)

    def step(self) -> bool:
        poller = zmq.Poller()
        poller.register(0, zmq.POLLIN)
        for session in self.sessions:
            poller.register(session.dealer, zmq.POLLIN)
            poller.register(session.attach.fileno(), zmq.POLLIN)
        ready = dict(poller.poll(20))
        if any(session.is_lost() for session in self.sessions):
            self.lose()
        for session in self.sessions:
            session.drain()
            session.tick()
        due = [call for at, call in self.later if time.monotonic() >= at]
        self.later = [one for one in self.later if one[1] not in due]
        for call in due:
            call()
        return self.read_lines() if 0 in ready else True

    def lose(self) -> None:
        for session in self.sessions:
            session.close()
        for name, offer in self.offers.items():
            tell("released", name, "lost")
            self.cells[offer["cell"] % 512] = 0
        self.offers.clear()
        self.attach()

    def read_lines(self) -> bool:
        try:
            chunk = os.read(0, 65536)
        except BlockingIOError:
            return True
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            word, name, *rest = line.decode().split(" ", 2)
            getattr(self, f"do_{word}")(name, *rest)
        return bool(chunk)

    def do_offer(self, name: str, line: str) -> None:
        num_tokens, self.num_cells = int(line.split(maxsplit=1)[0]), self.num_cells + 1
        ids = [self.unused.popleft() for _ in range(-(-num_tokens // BLOCK))]
        offer = self.offers[name] = {"ids": ids, "cell": self.num_cells}
        self.fill(int(name), ids, num_tokens)
        table = {"ids": struct.pack(f"<{len(ids)}I", *ids), "first_block": 0}
        body = {"request_id": name, "num_tokens": num_tokens, "tables": {"full": table}}
        self.cells[self.num_cells % 512] = self.num_cells * 4 + 3
        self.begin(name, {**body, "sealed": True, "cell": offer["cell"]})

    def fill(self, name: int, ids: list[int], num_tokens: int) -> None:
        for position in range(num_tokens):
            for part in range(2):
                at = ids[position // BLOCK] * BLOCK_BYTES + part * BLOCK_BYTES // 2
                at += position % BLOCK * HELD * ROW_BYTES
                for head in range(HEADS):
                    rank, held = divmod(head, HELD)
                    base, start = 101 * name + 37 * part + 7 * position, at + held * ROW_BYTES
                    row = bytes((base + 23 * head + 3 * i) % 251 for i in range(ROW_BYTES))
                    self.maps[rank][start : start + ROW_BYTES] = row

    def begin(self, name: str, body: Map) -> None:
        """Request an offer, again when the agent is busy."""

        def on_reply(reply: Map) -> None:
            if "ok" in reply:
                if name in self.offers:
                    self.offers[name]["id"] = reply["ok"]["offer_id"]
                    tell("ticket", name, json.dumps(reply["ok"]["ticket"]))
                return
            code, detail = reply["error"]["code"], reply["error"]["detail"]
            if code == "busy":
                wait_s = detail.get("retry_after_s", 0.1)
                self.later.append((time.monotonic() + wait_s, lambda: self.begin(name, body)))
            else:
                self.free(name)
                tell("refused", name, code)

        self.control.ask("offer", body, on_reply)

    def free(self, name: str) -> None:
        offer = self.offers.pop(name)
        self.cells[offer["cell"] % 512] = 0
        self.unused.extendleft(offer["ids"])

    def do_withdraw(self, name: str) -> None:
        self.control.ask("withdraw", {"offer_id": self.offers[name]["id"]}, lambda _: None)

    def on_notice(self, op: str, body: Map) -> None:
        if op == "released":
            if body["request_id"] in self.offers:
                self.free(body["request_id"])
            tell("released", body["request_id"], body["outcome"])


if __name__ == "__main__":
    Engine().run()
