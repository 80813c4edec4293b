"""An engine that asks for huge pages is told once where the machine has none."""

import logging

import pytest

from kvbus.engine import RankMemory
from kvbus.memory.segment import GIVING_WORDS, HugePages, shmem_word
from tests.engine.recording import SPEC
from tests.memories import NHD


@pytest.mark.parametrize("asked", [False, "advise"])
def test_a_machine_without_huge_pages_is_logged_if_they_were_asked_for(
    asked: HugePages, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvbus.engine"):
        memory = RankMemory.allocate(SPEC, 0, NHD, num_blocks=4, huge_pages=asked)
        memory.close()

    lines = [record.getMessage() for record in caplog.records]
    must_tell = asked == "advise" and shmem_word() not in GIVING_WORDS
    assert len(lines) == must_tell
    assert all("shmem_enabled" in line and SPEC.engine_id in line for line in lines)
