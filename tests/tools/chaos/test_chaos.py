"""A minute of chaos, and that what looks for damage sees it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvbus.geometry import KvLayout
from tests.process.security.wire import GREETING, frame
from tests.support.memories import Memory, private_cache
from tests.support.pattern import Pool, View, expected, fill, num_wrong_bytes, views_of
from tests.tools.chaos.draws import draw_faults
from tests.tools.chaos.rogue import frames_of
from tests.tools.chaos.shapes import BY_NAME

ROOT = Path(__file__).parents[3]
ENDS_WITHIN_S = 400
FEW = 8


@pytest.mark.timeout(ENDS_WITHIN_S + 20)
def test_minute_of_chaos_has_no_wrong_byte_and_everything_ends() -> None:
    command = [sys.executable, "-m", "tests.tools.chaos", "--seed", "7", "--minutes", "1"]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
    )

    assert ended.stdout, ended.stderr
    found = json.loads(ended.stdout)
    assert found["violations"] == [], ended.stdout
    assert ended.returncode == 0, ended.stderr
    assert found["fetches_completed"]
    assert found["rogue_answered"]


def test_same_seed_draws_same_faults_and_another_seed_others() -> None:
    again = draw_faults(1, 0, 60.0)

    assert draw_faults(1, 0, 60.0) == again
    assert again not in (draw_faults(2, 0, 60.0), draw_faults(1, 1, 60.0))


def views(name: str) -> list[View]:
    """Those of a small cache of this engine."""
    shape = BY_NAME[name]
    memory = Memory(KvLayout.parse(shape.layout))
    caches = [private_cache(shape.spec, rank, memory, FEW) for rank in range(shape.tp)]
    return views_of(shape.spec, caches)


def test_changed_bit_in_free_block_is_reported_with_last_owner() -> None:
    cache, told = views("d-wide"), list[tuple[str, str]]()
    pool = Pool(cache, dict.fromkeys(("full", "window"), FEW), lambda *of: told.append(of), 1)
    taken = pool.take({"full": 2, "window": 0}, "fetch 5")
    assert taken is not None
    pool.give(taken)
    pool.check()
    told_before = list(told)

    cache[0].bits[taken["full"][0], 3, 0, 0] ^= 1
    pool.check()

    assert told_before == []
    assert told == [("late_write", "1 free blocks changed after fetch 5")]


@pytest.mark.parametrize("name", ["d-wide", "d-latent", "d-same"])
def test_wrong_bit_is_seen_in_any_view_and_offers_share_no_cell(
    name: str,
) -> None:
    cache = views(name)
    num_tokens = cache[0].group.block_size
    for view in cache:
        ids = range(num_tokens // view.group.block_size)
        found = view.bits[: len(ids)]
        fill(8, [view], {view.group.name: ids}, 0, num_tokens)
        other = found.clone()
        fill(9, [view], {view.group.name: ids}, 0, num_tokens)
        want = expected(9, view, ids, holder=None, first=0, stop=num_tokens, zero_tail=False)

        assert num_wrong_bytes(found, want) == 0
        words = [one.contiguous().view(torch.int64) for one in (found, other)]
        assert not torch.any(words[0] == words[1])
        found[-1, -1, -1, -1] ^= 1
        assert num_wrong_bytes(found, want) == 1


def test_requests_are_read_off_a_stream_that_was_overheard() -> None:
    ready = frame(b"\x05READY", flags=4)
    asked = frame(b"\x82\xa2id\x07\xa4boot\xa1b") + frame(b"\x81\xa2id\x08" + bytes(300))

    assert list(frames_of(GREETING + ready + asked, len(GREETING))) == [{"id": 7, "boot": "b"}]
