"""Rules and their observations. Rule names are stable."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kvbus.errors import ProtocolError, docs_url

MAX_SEEN = 3
PAGE = "protocol-engine"


class Rule(NamedTuple):
    """``anchor`` is a heading of docs/protocol-engine.md."""

    name: str
    anchor: str
    text: str


BOTH = (
    Rule("attach.framing", "attach-socket", "A message is its length and one msgpack map."),
    Rule("attach.first_byte", "attach-socket", "A descriptor comes on the first byte, alone."),
    Rule("attach.hello", "hello", "`hello` comes first, once, and speaks this version."),
    Rule("attach.boot", "boot-ids", "Each connection has a boot id of its own, never used again."),
    Rule("attach.messages", "attach-socket", "Messages have the fields and types of the page."),
    Rule("attach.size", "segment", "The file has the size that `segment` states."),
    Rule("attach.seals", "attach-socket", "The file is sealed against growing and shrinking."),
    Rule("attach.inheritance", "attach-socket", "No child process inherits the connection."),
    Rule("frames.one", "frames", "A message is one frame, without a delimiter."),
    Rule("frames.maps", "frames", "Maps have strings as keys, none twice; no extension types."),
    Rule("frames.envelope", "the-envelope", "A request has v, op, id, boot and body."),
    Rule("frames.boot", "boot-ids", "The boot id is that of a live attach connection."),
    Rule("frames.secret", "the-envelope", "A session has one secret, which nobody else has."),
    Rule("frames.body", "engine-socket", "The body has the fields and types of the page."),
    Rule("requests.ids", "the-envelope", "Ids start at random and rise."),
    Rule(
        "requests.once", "requests-and-replies", "A request is sent once, however late its answer."
    ),
    Rule("requests.late_answer", "requests-and-replies", "A late answer is waited for, and taken."),
    Rule("requests.order", "requests-and-replies", "Answers may come in another order."),
    Rule("requests.unknown_field", "versions", "Unknown fields are ignored."),
    Rule("requests.unknown_code", "errors", "An unknown code is an error like others."),
    Rule(
        "requests.busy",
        "when-an-agent-is-busy",
        "After `busy` the request is sent again, but not at once.",
    ),
    Rule("requests.ping", "boot-ids", "A silent agent is pinged."),
    Rule("notices.unknown", "notices", "Notices of an unknown kind are ignored."),
    Rule("register.sessions", "register", "All ranks and one control session register."),
    Rule("register.same_engine", "register", "Every session states the same engine."),
    Rule("register.memory", "memory", "Regions lie in their segments, and do not overlap."),
    Rule("ends.silence", "requests-and-replies", "Requests continue when a stopped agent resumes."),
    Rule(
        "ends.hang_up",
        "when-the-attach-connection-ends",
        "After a lost connection the engine registers again with new boot ids.",
    ),
    Rule("ends.new_agent", "boot-ids", "It registers again with an agent that was restarted."),
    Rule(
        "ends.told",
        "when-the-attach-connection-ends",
        "Offers and fetches of a lost agent end, or are repeated with the next one.",
    ),
    Rule("ends.stop", "attach-socket", "At the end of its stdin the engine exits with status 0."),
)
PREFILL = (
    Rule("offer.tables", "block-tables", "An offer has the blocks of all of its tokens."),
    Rule(
        "offer.numbers", "memory", "The KV lies where the regions place it, before it is announced."
    ),
    Rule("offer.extend", "extend", "`extend` has only new blocks, and none where none are new."),
    Rule("offer.sealed", "seal", "An open offer is sealed after its last tokens."),
    Rule("offer.unchanged", "offer", "Offered blocks stay as they are until `released`."),
    Rule("offer.reused", "released", "Blocks are used again after `released`."),
    Rule(
        "offer.cell", "commit-cells", "The cell of an offer is 0 before its blocks are used again."
    ),
    Rule("offer.again", "publish-again", "What is published again is the same offer, as a whole."),
    Rule("offer.ticket", "ticket", "The ticket is passed on unchanged, unknown fields too."),
    Rule("offer.told", "released", "The engine reports the end of an offer once."),
    Rule("offer.answered", "offer", "Every request is offered, or its refusal is reported."),
)
DECODE = (
    Rule("fetch.answered", "fetch", "Every request is fetched, or its refusal is reported."),
    Rule("fetch.tables", "block-tables", "A fetch has exactly the blocks of its positions."),
    Rule("fetch.tokens", "fetch", "A fetch names the tokens that are wanted."),
    Rule("fetch.id", "fetch", "A fetch id is used once."),
    Rule("fetch.ticket", "ticket", "The ticket arrives unchanged, unknown fields too."),
    Rule("fetch.numbers", "memory", "The KV is read where the regions place it."),
    Rule("fetch.completed", "fetch", "KV is used after `completed`, and not before."),
    Rule("fetch.told", "fetch", "The engine reports the end of a fetch once."),
    Rule("fetch.failed", "fetch", "A fetch that failed is reported as failed."),
    Rule("fetch.cancel", "cancel", "An abandoned fetch is cancelled, and its end awaited."),
    Rule("fetch.blocks", "fetch", "Blocks are not used again before they are free."),
    Rule(
        "fetch.lost_blocks",
        "when-the-attach-connection-ends",
        "Blocks of a lost fetch wait until the agent's process has ended.",
    ),
    Rule("fetch.reused", "blocks_freed", "Blocks are used again once they are free."),
)
RULES = {rule.name: rule for rule in (*BOTH, *PREFILL, *DECODE)}


class Verdict(StrEnum):
    PASSED = "passed"
    FAILED = "failed"
    UNTRIED = "untried"


class RuleOutcome(msgspec.Struct):
    name: str
    verdict: Verdict
    page: str
    rule: str
    num_checks: int
    num_wrong: int
    seen: list[str]


class Book:
    def __init__(self) -> None:
        self._num_checks = Counter[str]()
        self._violations = defaultdict[str, list[str]](list)
        self._untried: dict[str, str] = {}

    def expect(self, rule: str, holds: bool, violation: str = "") -> bool:
        name = RULES[rule].name
        self._num_checks[name] += 1
        if not holds:
            self._violations[name].append(violation)
        return holds

    @contextmanager
    def reading(self, rule: str) -> Iterator[None]:
        try:
            yield
        except ProtocolError as error:
            cause = str(error.__cause__ or "")
            violation = error.message if cause in error.message else f"{error.message}: {cause}"
            self.expect(rule, False, violation)
            raise
        self.expect(rule, True)

    def untried(self, rule: str, why: str) -> None:
        self._untried[RULES[rule].name] = why

    @property
    def num_wrong(self) -> int:
        return sum(map(len, self._violations.values()))

    def outcomes(self, rules: Iterable[Rule]) -> list[RuleOutcome]:
        return [self._outcome(rule) for rule in rules]

    def _outcome(self, rule: Rule) -> RuleOutcome:
        num_checks, violations = self._num_checks[rule.name], self._violations[rule.name]
        verdict = (
            Verdict.FAILED if violations else Verdict.PASSED if num_checks else Verdict.UNTRIED
        )
        seen = list(dict.fromkeys(violations))[:MAX_SEEN]
        if verdict is Verdict.UNTRIED:
            seen = [self._untried.get(rule.name, "it was not observed")]
        page = docs_url(PAGE, rule.anchor)
        return RuleOutcome(rule.name, verdict, page, rule.text, num_checks, len(violations), seen)
