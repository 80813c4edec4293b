"""A small engine on bare sockets that can be told to have one flaw.

    KVBUS_ROLE=prefill KVBUS_ATTACH=... python -m tests.tools.conform.raw_engine [FLAW [ALLOCATOR]]

The allocator is `stack` (the block that came back last is used first), `queue` or `random`.

It knows nothing of kvbus but its protocol page, and docs/conformance.md.
"""

import atexit
import ctypes
import fcntl
import json
import mmap
import os
import random
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator

import zmq

from tests.tools.conform.raw_session import (
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
    Map,
    Session,
    Tokens,
    positions_of,
    row,
)

ALLOCATOR = sys.argv[2] if len(sys.argv) > 2 else "stack"
SHARED = ctypes.CDLL(None, use_errno=True)
OnOk = Callable[[str, Map], None]


def packed(tables: Map) -> Map:
    return {
        group: {"ids": struct.pack(f"<{len(ids)}I", *ids), "first_block": first}
        for group, (ids, first) in tables.items()
    }


def named(job: Map) -> int:
    """The word of an offer that the agent has not seen."""
    return int(job["cell"]) * 4 + 3


def carried(ticket: Map) -> Map:
    """The ticket as this engine passes it on."""
    if FLAW == "ticket_letters":
        ticket["a_later_field"] = ticket["a_later_field"].encode("ascii", "replace").decode()
    if FLAW == "ticket_fields":
        ticket.pop("a_later_field")
    return ticket


def tell(*words: object) -> None:
    print(*words, flush=True)


class Engine:
    """One control session, TP memory sessions, and a cache of BLOCKS blocks."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.memory: list[int] = []
        self.cells_fd: int = SHARED.memfd_create(b"cells", 3)
        os.ftruncate(self.cells_fd, 4096)
        fcntl.fcntl(self.cells_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        self.cells = memoryview(mmap.mmap(self.cells_fd, 4096)).cast("Q")
        self.num_words = 0
        self.maps: list[mmap.mmap] = []
        self.jobs: dict[str, Map] = {}
        self.later: list[tuple[float, Callable[[], None]]] = []
        self.rest = b""
        self.reset()

    def segment(self) -> int:
        fd: int = SHARED.memfd_create(b"kv", 3)
        os.ftruncate(fd, SIZE_BYTES)
        if FLAW != "unsealed":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        return fd

    def reset(self) -> None:
        self.free = {group["name"]: deque(range(BLOCKS)) for group in GROUPS}
        self.sessions: list[Session] = []

    def attach(self) -> None:
        """Come to the agent, each time with new memory: into the old an agent may still write."""
        if FLAW not in ("same_memory", "word_when_lost") or not self.memory:
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

    def on_notice(self, op: str, body: Map) -> None:
        raise NotImplementedError

    def look_at(self, op: str) -> None:
        if FLAW == "dies_of_notices" and op not in ("released", "landed", "blocks_freed"):
            sys.exit(op)

    def run(self) -> None:
        os.set_blocking(0, False)
        self.attach()
        while self.step():
            pass
        if FLAW == "never_ends":
            time.sleep(60)
        sys.exit(3 if FLAW == "bad_status" else 0)

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
        for job in self.jobs.values():
            self.close_cell(job, is_lost=True)
        self.jobs.clear()
        self.attach()

    def close_cell(self, job: Map, *, is_lost: bool = False) -> None:
        """What comes before another use of the blocks."""
        if job.get("cell") and ("word_when_lost" if is_lost else "word_when_released") != FLAW:
            self.cells[job["cell"] % 512] = 0

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

    def take(self, group: str, positions: Tokens) -> tuple[list[int], int]:
        """Blocks of the cache for these positions, and the first of them in the request."""
        start, stop = positions
        first = start // BLOCK
        count = -(-stop // BLOCK) - first if stop > start else 0
        if FLAW == "short_table" and count > 1:
            count -= 1
        ids = [self.take_one(group) for _ in range(count)]
        return ids, first

    def take_one(self, group: str) -> int:
        free = self.free[group]
        if ALLOCATOR == "random":
            free.rotate(random.randrange(len(free)))
        return free.popleft()

    def give_back(self, job: Map) -> None:
        for group, (ids, _) in job["tables"].items():
            (self.free[group].extend if ALLOCATOR == "queue" else self.free[group].extendleft)(ids)

    def slots(self, job: Map, start: int, stop: int) -> Iterator[list[int]]:
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
                            yield [rank, layer, part, position, head, at + held * ROW_BYTES]

    def begin(self, name: str, op: str, body: Map, on_ok: OnOk) -> None:
        """Ask for an offer or a fetch; again when the agent is busy."""
        self.control.ask(op, body, lambda reply: self.on_begun(name, op, body, on_ok, reply))

    def on_begun(self, name: str, op: str, body: Map, on_ok: OnOk, reply: Map) -> None:
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


class Prefill(Engine):
    def do_offer(self, name: str, line: str) -> None:
        if FLAW == "offers_nothing":
            return
        counts = [int(count) for count in line.split()]
        job = self.jobs[name] = {"tables": {}, "counts": counts, "offer": None, "done": 0}
        for group in GROUPS:
            whole = (0, counts[0]) if len(counts) > 1 else positions_of(group, 0, counts[0])
            job["tables"][group["name"]] = self.take(group["name"], whole)
        if FLAW != "late_numbers":
            self.fill(name, job, counts[0])
        body: Map = {
            "request_id": name,
            "num_tokens": counts[0],
            "tables": packed(job["tables"]),
            "sealed": len(counts) == 1,
        }
        if len(counts) == 1:
            self.num_words += 1
            body["cell"] = job["cell"] = self.num_words
            self.cells[self.num_words % 512] = self.num_words if FLAW == "cell" else named(job)
        if FLAW == "first_block" and len(counts) == 1:
            body["tables"]["tail"]["first_block"] = 0
        self.begin(name, "offer", body, self.on_offer)
        if FLAW == "late_numbers":
            time.sleep(1.0)
            self.fill(name, job, counts[0])

    def fill(self, name: str, job: Map, num_tokens: int) -> None:
        seed = int(name)
        for rank, *which, at in self.slots({"tables": job["tables"]}, 0, num_tokens):
            if FLAW == "heads_swapped":
                which[3] ^= 1
            self.maps[rank][at : at + ROW_BYTES] = row(seed, *which)
        job["done"] = num_tokens

    def on_offer(self, name: str, reply: Map) -> None:
        job, ticket = self.jobs.get(name), carried(reply["ticket"])
        if job is None:
            return
        job["offer"] = reply["offer_id"]
        tell("ticket", name, json.dumps(ticket))
        if FLAW == "reuses_offered":
            self.give_back(job)
            job["tables"] = {}
        self.grow(name, job)

    def grow(self, name: str, job: Map) -> None:
        """Announce what comes after the first tokens, one step after the other."""
        counts = job["counts"][1:]
        for number, num_tokens in enumerate(counts):
            tables = {}
            for group in GROUPS:
                ids, first = job["tables"][group["name"]]
                missing = -(-num_tokens // BLOCK) - first - len(ids)
                new = [self.take_one(group["name"]) for _ in range(max(0, missing))]
                if FLAW == "extends_with_all":
                    tables[group["name"]] = (ids + new, first)
                elif new:
                    tables[group["name"]] = (new, first + len(ids))
                job["tables"][group["name"]] = (ids + new, first)
            self.fill(name, job, num_tokens)
            body = {"offer_id": job["offer"], "num_tokens": num_tokens, "tables": packed(tables)}
            last = number == len(counts) - 1
            self.control.ask("extend", body, lambda _: None)
            if last and FLAW != "never_sealed":
                self.control.ask("seal", {"offer_id": job["offer"]}, lambda _: None)

    def do_withdraw(self, name: str) -> None:
        self.control.ask("withdraw", {"offer_id": self.jobs[name]["offer"]}, lambda _: None)
        if FLAW == "reuse_withdrawn":
            self.give_back(self.jobs[name])

    def on_notice(self, op: str, body: Map) -> None:
        self.look_at(op)
        if op == "released":
            job = self.jobs.pop(body["request_id"], None)
            if job:
                self.close_cell(job)
            if job and FLAW != "blocks_lost":
                self.give_back(job)
            if FLAW != "end_not_told":
                tell("released", body["request_id"], body["outcome"])
            if FLAW == "told_twice":
                atexit.register(tell, "released", body["request_id"], body["outcome"])


class Decode(Engine):
    def do_fetch(self, name: str, line: str) -> None:
        if FLAW == "fetches_nothing":
            return
        first_token, num_tokens, text = line.split(" ", 2)
        tokens = int(first_token), int(num_tokens)
        tables = {
            group["name"]: self.take(group["name"], positions_of(group, *tokens))
            for group in GROUPS
        }
        fetch_id = "always" if FLAW == "one_fetch_id" else f"fetch-{name}"
        self.jobs[name] = {"tables": tables, "tokens": tokens, "fetch": fetch_id}
        ticket = carried(json.loads(text))
        body: Map = {
            "fetch_id": fetch_id,
            "ticket": ticket,
            "first_token": tokens[0] if FLAW != "from_zero" else 0,
            "num_tokens": tokens[1],
            "tables": packed(tables),
            "chunk_tokens": BLOCK,
        }
        if FLAW == "no_empty_tables":
            body["tables"] = {k: v for k, v in body["tables"].items() if v["ids"]}
        self.begin(name, "fetch", body, self.on_fetched)
        if FLAW in ("uses_early", "writes_early"):
            self.later.append((time.monotonic() + 0.2, lambda: self.do_early(name)))

    def do_early(self, name: str) -> None:
        if FLAW == "uses_early":
            self.jobs[name]["early"] = self.num_wrong(name)
        if FLAW == "writes_early":
            job = self.jobs[name]
            for rank, *_which, at in self.slots(job, *job["tokens"]):
                self.maps[rank][at] = 0

    def num_wrong(self, name: str) -> int:
        job, num_wrong = self.jobs[name], 0
        for rank, *which, at in self.slots(job, *job["tokens"]):
            have = self.maps[rank][at : at + ROW_BYTES]
            num_wrong += sum(a != b for a, b in zip(have, row(int(name), *which), strict=True))
        return num_wrong

    def do_cancel(self, name: str) -> None:
        if FLAW == "no_cancel":
            return
        self.control.ask("cancel", {"fetch_id": self.jobs[name]["fetch"]}, lambda _: None)
        if FLAW == "reuses_cancelled":
            self.give_back(self.jobs[name])
            self.jobs[name]["tables"] = {}

    def on_notice(self, op: str, body: Map) -> None:
        self.look_at(op)
        found = (one for one, job in self.jobs.items() if job["fetch"] == body.get("fetch_id"))
        name = next(found, None)
        if name is not None and op == "blocks_freed":
            self.give_back(self.jobs.pop(name))
        if name is not None and op == "landed" and FLAW == "landed_is_used":
            tell("fetched", name, "completed", self.num_wrong(name))

    def on_fetched(self, name: str, body: Map) -> None:
        self.tell_end(name, body)
        free = body["blocks_free"] or FLAW == "reuses_early"
        if free and FLAW != "blocks_lost":
            self.give_back(self.jobs.pop(name))

    def tell_end(self, name: str, body: Map) -> None:
        outcome = body["outcome"]
        if FLAW == "failed_is_used" and outcome == "failed":
            outcome = "completed"
        if FLAW == "end_not_told":
            return
        if outcome != "completed":
            tell("fetched", name, outcome)
            return
        num_wrong = 0 if FLAW == "does_not_look" else self.num_wrong(name)
        told = "fetched", name, outcome, self.jobs[name].get("early", num_wrong)
        tell(*told)
        if FLAW == "told_twice":
            atexit.register(tell, *told)


if __name__ == "__main__":
    (Prefill() if ROLE == "prefill" else Decode()).run()
