"""The table of a case is for people: whole names, 80 columns, nothing that was not measured."""

from collections import Counter

import pytest

from kvbus.bench.figures import CASES, GPU_CASES, Figure, milliseconds, speed
from kvbus.bench.machine import facts, head
from kvbus.bench.sheet import TITLES, Sheet, label, lines
from kvbus.progress import Progress

RESHAPED = [
    Figure("auto vs naive READ", 9.4321, "x", least=8.0),
    Figure("auto vs the best path", 0.8, "x", least=1 / 1.2),
    Figure("unmapped vs naive READ", 3.8, "x", least=8.0),
    *(speed(f"  {name}", 64 << 20, s) for name, s in (("naive READ", 0.122), ("auto", 0.0129))),
    milliseconds("  naive READ p50", 0.122),
    milliseconds("  auto p50", 0.0129),
    milliseconds("  resolving p50", 0.0),
    milliseconds("  reading p50", 0.0123),
    Figure("prefill agent CPU", 232.4, "us each"),
    Figure("descriptors of naive READ", 65536),
]
SHOWN = """\
tp-1-to-2: from an engine of one rank to one of two
  kvbus                                                12.90 ms 5.20 GB/s
  bare NIXL, run by run                                  122 ms 0.55 GB/s
  speed of kvbus : bare NIXL, run by run                 9.43 x >= 8     ok
  speed of kvbus : its best path                         0.80 x >= 0.833 missed
  speed of kvbus as two hosts : bare NIXL, run by run    3.80 x >= 8     missed
  CPU of the prefill agent for each handoff              232 us
  runs of bytes                                          65,536
  stages of a fetch, ms: reading 12.30

"""


def test_figures_are_shown_by_names_for_people_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sheet = Sheet(Progress(1), "")
    sheet.begin("tp-1-to-2")
    sheet.show(RESHAPED)

    assert capsys.readouterr().out == SHOWN
    assert [row["name"] for row in sheet.rows] == [figure.name for figure in RESHAPED]
    assert max(map(len, SHOWN.splitlines())) <= 80


def test_stages_that_fill_a_line_are_wrapped() -> None:
    names = ("resolving", "queued", "acquiring", "waiting", "reading", "committing")
    stages = [milliseconds(f"  packed: {name} p50", 0.5) for name in (*names, "engine to agent")]

    *shown, last = lines("one-block", stages).splitlines()[1:-1]
    assert shown[0].startswith("  stages of a fetch, ms: packed: resolving 500.00, ")
    assert max(map(len, (*shown, last))) <= 80
    assert last.endswith("engine to agent 500.00")


def test_every_case_has_a_title_and_equal_names_differ() -> None:
    assert {*CASES, *GPU_CASES} <= TITLES.keys()
    of_a_case = ("kvbus", "raw READ", "unmapped", "memcpy", "kvbus vs memcpy", "unmapped vs memcpy")
    assert max(Counter(map(label, of_a_case)).values()) == 1


def test_head_has_hardware_and_versions_in_80_columns() -> None:
    found = {**facts(), "gpus": ["NVIDIA H200", "NVIDIA H200"], "driver": "580.95.05"}

    text = head(found)
    for part in (found["cpu"], f"{found['cpus']} CPUs", "NVIDIA H200", "driver 580.95.05"):
        assert part in text.replace("\n", " ")
    assert f"kvbus {found['kvbus']}, nixl {found['nixl']}" in text.replace("\n", " ")
    assert max(map(len, text.splitlines())) <= 80
