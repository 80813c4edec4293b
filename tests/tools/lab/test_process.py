"""The line between a tool and a process of engines."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvbus.errors import ErrorCode, PeerLost, RequestRefused
from kvbus.lab.process import engine_process
from tests.tools.lab.answering import LAST_WORDS

pytestmark = pytest.mark.anyio


def answering(folder: Path) -> Any:
    return engine_process("engine", "tests.tools.lab.answering", log=folder / "log")


async def test_each_question_gets_its_own_answer_also_a_late_one(tmp_path: Path) -> None:
    async with answering(tmp_path) as process:
        late = asyncio.create_task(process.request(dict[str, int], "echo", number=6, after_s=0.5))
        soon = await process.request(dict[str, int], "echo", number=7)
        was_late = not late.done()
        answers = [await late, soon]

    assert answers == [{"number": 6}, {"number": 7}]
    assert was_late


async def test_error_in_process_refuses_one_question_only(tmp_path: Path) -> None:
    async with answering(tmp_path) as process:
        with pytest.raises(RequestRefused, match="no room") as refused:
            await process.request(int, "refuse")
        after = await process.request(dict[str, int], "echo")

    assert refused.value.code is ErrorCode.BUSY
    assert after == {}


async def test_process_end_ends_block_and_tells_last_cells(tmp_path: Path) -> None:
    with pytest.RaisesGroup(pytest.RaisesExc(PeerLost, match=LAST_WORDS), flatten_subgroups=True):
        async with answering(tmp_path) as process:
            await process.request(int, "end")
