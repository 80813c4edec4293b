"""Engines that follow the page break no rule; each family of rules is broken by a flaw.

The engines are on kvbus's own SDK; those with flaws that the SDK does not allow, on bare sockets.
"""

import pytest

from tests.tools.conform.conftest import ROLES, Play, Run, raw_engine, sdk_engine

PATIENCE_S = "2.5"
"""Short, as most flaws are seen by what does not happen."""
ON_SOCKETS = {
    "unsealed": ("stop", "attach.seals"),
    "delimiter": ("stop", "frames.one"),
    "repeats": ("late", "requests.once"),
    "busy_at_once": ("busy", "requests.busy"),
    "dies_of_notices": ("many", "notices.unknown"),
    "two_engines": ("stop", "register.same_engine"),
    "lost_not_told": ("hang_up", "ends.told"),
    "bad_status": ("stop", "ends.stop"),
    "cell": ("sizes", "offer.cell"),
}
IN_USE_OF_SDK = {
    ("prefill", "wrong_numbers"): ("sizes", "offer.numbers"),
    ("prefill", "never_sealed"): ("grows", "offer.sealed"),
    ("prefill", "reuses_offered"): ("blocks", "offer.unchanged"),
    ("decode", "does_not_look"): ("counts", "fetch.numbers"),
    ("decode", "reuses_early"): ("blocks", "fetch.blocks"),
}


def options(scene: str) -> tuple[str, ...]:
    return "--patience", PATIENCE_S, "--start", "60", "--scene", scene


@pytest.mark.timeout(300)  # each plays all scenes
def test_engines_without_a_flaw_break_no_rule(run: Run) -> None:
    scenes = sorted({scene for scene, _ in ON_SOCKETS.values()})
    of_sdk = [Play(role, sdk_engine()) for role in ROLES]

    ended = run([*of_sdk, *(Play("prefill", raw_engine(), options(one)) for one in scenes)])

    assert [(one.status, one.seen("failed")) for one in ended] == [(0, set())] * len(ended)
    # An engine with blocking calls has one request at a time.
    assert all(one.seen("untried") <= {"requests.order"} for one in ended[:2])
    rules = [rule for _, rule in (*ON_SOCKETS.values(), *IN_USE_OF_SDK.values())]
    families = {name.partition(".")[0] for one in ended for name in one.rules}
    assert {rule.partition(".")[0] for rule in rules} == families


@pytest.mark.timeout(300)
def test_a_flaw_is_named_by_its_rule(run: Run) -> None:
    plays = {
        Play("prefill", raw_engine(flaw), options(scene)): rule
        for flaw, (scene, rule) in ON_SOCKETS.items()
    }
    plays |= {
        Play(role, sdk_engine(flaw), options(scene)): rule
        for (role, flaw), (scene, rule) in IN_USE_OF_SDK.items()
    }

    ended = dict(zip(plays, run([*plays]), strict=True))

    found = {play.command[-1]: one.seen("failed") for play, one in ended.items()}
    missed = [play for play, rule in plays.items() if rule not in ended[play].seen("failed")]
    assert not missed, found
    assert {one.status for one in ended.values()} == {1}
