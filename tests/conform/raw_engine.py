"""A small engine on bare sockets that can be told to have one flaw: its cache, its lines, its loop.

    python raw_prefill.py [FLAW [ALLOCATOR]]
    python raw_decode.py [FLAW [ALLOCATOR]]

The allocator is `stack` (the block that came back last is used first), `queue` or `random`.

It knows nothing of kvbus but its protocol page, and docs/conformance.md.
"""

import ctypes
import fcntl
import mmap
import os
import random
import struct
import sys
import time
from collections import deque

import zmq
from raw_session import (
    BLOCK,
    BLOCK_BYTES,
    BLOCKS,
    FLAW,
    GROUPS,
    HEADS,
    HELD,
    LAYER_BYTES,
    ROLE,
    ROW_BYTES,
    SIZE_BYTES,
    TP,
    Session,
    positions_of,
)

ALLOCATOR = sys.argv[2] if len(sys.argv) > 2 else "stack"
SHARED = ctypes.CDLL(None, use_errno=True)


def packed(tables):
    return {
        group: {"ids": struct.pack(f"<{len(ids)}I", *ids), "first_block": first}
        for group, (ids, first) in tables.items()
    }


def tell(*words):
    print(*words, flush=True)


class Engine:
    """One control session, TP memory sessions, and a cache of BLOCKS blocks."""

    def __init__(self):
        self.context = zmq.Context()
        self.memory, self.maps = [], []
        self.jobs, self.later, self.rest = {}, [], b""
        self.reset()

    def segment(self):
        fd = SHARED.memfd_create(b"kv", 3)
        os.ftruncate(fd, SIZE_BYTES)
        if FLAW != "unsealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return fd

    def reset(self):
        self.free = {group["name"]: deque(range(BLOCKS)) for group in GROUPS}
        self.sessions = []

    def attach(self):
        """Come to the agent, each time with new memory: into the old an agent may still write."""
        if FLAW != "same_memory" or not self.memory:
            self.memory = [self.segment() for _ in range(TP)]
            self.maps = [mmap.mmap(fd, SIZE_BYTES) for fd in self.memory]
        self.reset()
        while True:
            try:
                ranks = TP - 1 if FLAW == "missing_rank" else TP
                for rank in range(ranks):
                    self.sessions.append(Session(self, rank))
                    self.sessions[-1].open(self.memory[rank])
                self.control = Session(self)
                self.sessions.append(self.control)
                self.control.open()
                return
            except OSError:
                for session in self.sessions:
                    session.close()
                self.reset()
                time.sleep(0.05)

    def run(self):
        os.set_blocking(0, False)
        self.attach()
        while self.step():
            pass
        if FLAW == "never_ends":
            time.sleep(60)
        sys.exit(3 if FLAW == "bad_status" else 0)

    def step(self):
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

    def lose(self):
        if FLAW == "ends_when_lost":
            sys.exit(1)
        if FLAW == "stays_lost":
            time.sleep(120)
        for session in self.sessions:
            session.close()
        word = "released" if ROLE == "prefill" else "fetched"
        if FLAW != "lost_not_told":
            for name in self.jobs:
                tell(word, name, "lost")
        self.jobs.clear()
        self.attach()

    def read_lines(self):
        try:
            chunk = os.read(0, 65536)
        except BlockingIOError:
            return True
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        for line in lines:
            word, name, *rest = line.decode().split(" ", 2)
            getattr(self, f"do_{word}")(name, *rest)
        return bool(chunk)

    def take(self, group, positions):
        """Blocks of the cache for these positions, and the first of them in the request."""
        start, stop = positions
        first = start // BLOCK
        count = -(-stop // BLOCK) - first if stop > start else 0
        if FLAW == "short_table" and count > 1:
            count -= 1
        ids = [self.take_one(group) for _ in range(count)]
        return ids, first

    def take_one(self, group):
        free = self.free[group]
        if ALLOCATOR == "random":
            free.rotate(random.randrange(len(free)))
        return free.popleft()

    def give_back(self, job):
        for group, (ids, _) in job["tables"].items():
            (self.free[group].extend if ALLOCATOR == "queue" else self.free[group].extendleft)(ids)

    def slots(self, job, start, stop):
        """Rank, layer, part, position, global head, and the address of a row."""
        for group in GROUPS:
            ids, first = job["tables"][group["name"]]
            for position in range(*positions_of(group, start, stop)):
                block = ids[min(position // BLOCK - first, len(ids) - 1)]
                for layer in group["layers"]:
                    for part in range(2):
                        at = layer * LAYER_BYTES + block * BLOCK_BYTES + part * BLOCK_BYTES // 2
                        at += position % BLOCK * HELD * ROW_BYTES
                        for head in range(HEADS):
                            rank, held = divmod(head, HELD)
                            yield rank, layer, part, position, head, at + held * ROW_BYTES

    def begin(self, name, op, body, on_ok):
        """Ask for an offer or a fetch; again when the agent is busy."""
        self.control.ask(op, body, lambda reply: self.on_begun(name, op, body, on_ok, reply))

    def on_begun(self, name, op, body, on_ok, reply):
        if "ok" in reply:
            on_ok(name, reply["ok"])
            return
        code, detail = reply["error"]["code"], reply["error"]["detail"]
        if code == "busy" and FLAW != "busy_not_again":
            wait_s = 0 if FLAW == "busy_at_once" else detail.get("retry_after_s", 0.1)
            at = time.monotonic() + wait_s
            self.later.append((at, lambda: self.begin(name, op, body, on_ok)))
            return
        if FLAW == "dies_of_codes":
            sys.exit(code)
        self.give_back(self.jobs.pop(name))
        tell("refused", name, code)
