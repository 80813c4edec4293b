"""Engines that follow the page break no rule; each rule is broken by a planted flaw.

The engines are on kvbus's own SDK; those with flaws that the SDK does not allow, on bare sockets.
"""

from collections.abc import Sequence
from typing import NamedTuple

import pytest

from tests.tools.conform.conftest import ROLES, Play, Run, engine

PATIENCE_S = "2.5"
"""Short, as most flaws are seen by what does not happen."""
GOOD_S = "15"
"""For engines without a flaw, also on a busy machine."""
SOCKETS_START_S, SDK_STARTS_S = "30", "60"


class Flaw(NamedTuple):
    """A scene, and the rule that it finds broken; a line of an engine, and its replacement.

    Without a ``role`` the engine is on bare sockets.
    """

    scene: str
    rule: str = ""
    line: str = ""
    broken: str = ""
    role: str = ""

    @property
    def play(self) -> Play:
        start_s = SDK_STARTS_S if self.role or not self.line else SOCKETS_START_S
        patience_s = PATIENCE_S if self.line else GOOD_S
        options = "--patience", patience_s, "--start", start_s, "--scene", self.scene
        command = engine("sdk" if self.role else "raw", self.line, self.broken)
        return Play(self.role or "prefill", command, options)


# fmt: off
P, D = ROLES
FLAWS = (
    ("stop", "attach.framing", 'packb({"op": op, "body": body})', "packb([op, body])"),
    ("stop", "attach.first_byte", '"i", [fd]', '"i", [fd, fd]'),
    ("stop", "attach.hello", "self.dealer.connect(self.call(",
        'self.call("segment", CELLS, self.engine.cells_fd), self.dealer.connect(self.call('),
    ("stop", "attach.messages", '"min_protocol": 1', '"min_protocol": "1"'),
    ("hang_up", "attach.boot", "self.secret = uuid.uuid4().hex,", 'self.secret = f"my-{rank}",'),
    ("stop", "attach.size", '"size_bytes": SIZE_BYTES}, mem', '"size_bytes": SIZE_BYTES + 1}, mem'),
    ("stop", "attach.seals", "fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK", "fcntl.F_SEAL_GROW"),
    ("stop", "attach.inheritance", "self.attach.connect(",
        "self.attach.set_inheritable(True), self.attach.connect("),
    ("stop", "frames.one", "dealer.send(frame)", 'dealer.send_multipart([b"", frame])'),
    ("stop", "frames.maps", "dealer.send(frame)",
        'dealer.send(bytes([frame[0] + 1]) + frame[1:] + b"\\xa1v\\x01")'),
    ("stop", "frames.envelope", '{"v": 1, "op": op', '{"op": op'),
    ("stop", "frames.boot", 'whose = {"boot": self.boot', 'whose = {"boot": uuid.uuid4().hex'),
    ("late", "frames.secret", '"secret": self.secret}', '"secret": uuid.uuid4().hex}'),
    ("late", "frames.body", '*ids), "first', '*ids).decode("latin1"), "first'),
    ("stop", "requests.ids", "random.getrandbits(48)", "1"),
    ("late", "requests.once", 'self.ask("ping", {})',
        "[self.dealer.send(frame) for frame, _ in self.waiting.values()]"),
    ("late", "requests.late_answer", 'self.ask("ping", {})', "self.waiting.clear()"),
    ("other_order", "requests.order", 'pop(message["re"], None)',
        'pop(min(self.waiting, default=message["re"]), None)'),
    ("other_order", "requests.unknown_field", "entry[1](message)",
        '"a_later_field" in message or entry[1](message)'),
    ("unknown_code", "requests.unknown_code", 'tell("refused", name, code)', "sys.exit(code)"),
    ("busy", "requests.busy", 'detail.get("retry_after_s", 0.1)', "0"),
    ("silence", "requests.ping", 'self.ask("ping", {})', "pass"),
    ("silence", "ends.silence", 'self.ask("ping", {})', "self.waiting.clear()"),
    ("many", "notices.unknown", "self.engine.on_notice(",
        'message["op"] == "released" or sys.exit(1); self.engine.on_notice('),
    ("stop", "register.sessions", "in enumerate(fds):", "in enumerate(fds[1:], 1):"),
    ("stop", "register.same_engine", '{"engine": SPEC}', '{"engine": SPEC | {"model": self.boot}}'),
    ("stop", "register.memory", '("kv", 2, BLOCK_BYTES // 2)', '("kv", 2, ROW_BYTES)'),
    ("hang_up", "ends.hang_up", "self.offers.clear()", "time.sleep(60)"),
    ("new_agent", "ends.new_agent", "self.offers.clear()", "time.sleep(60)"),
    ("hang_up", "ends.told", 'tell("released", name, "lost")', "pass"),
    ("stop", "ends.stop", "sys.exit(0)", "sys.exit(3)"),
    ("sizes", "offer.tables", '"first_block": 0', '"first_block": 1'),
    ("sizes", "offer.numbers", "23 * head", "23 * (head ^ 1)"),
    ("blocks", "offer.unchanged", 'self.control.ask("withdraw"',
        'self.unused.extendleft(self.offers[name]["ids"]), self.control.ask("withdraw"'),
    ("blocks", "offer.reused", 'self.unused.extendleft(offer["ids"])', "pass"),
    ("sizes", "offer.cell", "self.num_cells * 4 + 3", "self.num_cells"),
    ("sizes", "offer.ticket", '(reply["ok"]["ticket"])', '({**reply["ok"]["ticket"], "more": 1})'),
    ("many", "offer.told", 'tell("released", body["request_id"], body["outcome"])',
        '[tell("released", body["request_id"], body["outcome"]) for _ in "12"]'),
    ("sizes", "offer.answered", "num_tokens, self.num_cells =", "return; num_tokens, _ ="),
    ("sizes", "offer.numbers", "fill(name, blocks, spans)\n        try",
        "fill(9, blocks, spans)\n        try", P),
    ("grows", "offer.sealed", "offer.seal()", "pass", P),
    ("blocks", "offer.unchanged", "= offer, blocks", "= offer, self.cache.give_back(blocks) or {}",
        P),
    ("counts", "fetch.numbers", '"completed", self.cache.num_wrong(name, blocks, spans)',
        '"completed", 0', D),
    ("blocks", "fetch.blocks", "if fetch.are_blocks_free:", "if True:", D),
)
SLOW = (
    ("grows", "offer.extend", "ids in new.items()", "ids in blocks.items()", P),
    ("new_agent", "offer.again", "with Link(",
        "from kvbus.engine.offers import OfferRequest as O; again = O.publication; O.publication = "
        "lambda one: __import__('msgspec').structs.replace(again(one), secret=32 * '0')\n"
        "    with Link(", P),
    ("shapes", "fetch.answered", "first, last,", "return; first, last,", D),
    ("shapes", "fetch.tables", "self.link.fetch(",
        'blocks["full"] = blocks["full"][1:]; fetch = self.link.fetch(', D),
    ("shapes", "fetch.tokens", '"first_token": int(first)', '"first_token": 0', D),
    ("shapes", "fetch.id", "int(first)}", 'int(first), "fetch_id": "mine"}', D),
    ("shapes", "fetch.ticket", "json.loads(ticket)", '{**json.loads(ticket), "x": 1}', D),
    ("counts", "fetch.completed", "self.fetches[fetch] =",
        "time.sleep(0.2); early = self.cache.num_wrong(name, blocks, spans); "
        "self.cache.num_wrong = lambda *_: early; self.fetches[fetch] =", D),
    ("many", "fetch.told", "self.tell_end(name, fetch.notice, blocks, spans)",
        '[self.tell_end(name, fetch.notice, blocks, spans) for _ in "12"]', D),
    ("failed", "fetch.failed", "name, ended.outcome.value", 'name, "completed", 0', D),
    ("blocks", "fetch.cancel", "== name).cancel()", "== name)", D),
    ("hang_up", "fetch.lost_blocks", "if fetch.are_blocks_free:", "if True:", D),
    ("blocks", "fetch.reused", "self.cache.give_back(self.fetches.pop(fetch)[2])",
        "self.fetches.pop(fetch)", D),
)
# fmt: on


@pytest.mark.timeout(300)  # each plays all scenes
def test_engines_without_a_flaw_break_no_rule(run: Run) -> None:
    flaws = [Flaw(*one) for one in (*FLAWS, *SLOW)]
    scenes = sorted({flaw.scene for flaw in flaws if not flaw.role})
    of_sdk = [Play(role, engine("sdk"), ("--patience", GOOD_S)) for role in ROLES]

    ended = run([*of_sdk, *(Flaw(scene).play for scene in scenes)])

    assert [(one.status, one.seen("failed")) for one in ended] == [(0, set())] * len(ended)
    # An engine with blocking calls has one request at a time.
    assert all(one.seen("untried") <= {"requests.order"} for one in ended[:2])
    assert {flaw.rule for flaw in flaws} == {name for one in ended for name in one.rules}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("flaws", [FLAWS, pytest.param(SLOW, marks=pytest.mark.long)])
def test_a_flaw_is_named_by_its_rule(run: Run, flaws: Sequence[Sequence[str]]) -> None:
    planted = [Flaw(*one) for one in flaws]
    ended = run([flaw.play for flaw in planted])
    failed = {flaw: one.seen("failed") for flaw, one in zip(planted, ended, strict=True)}
    assert not {flaw: names for flaw, names in failed.items() if flaw.rule not in names}
    assert {one.status for one in ended} == {1}
