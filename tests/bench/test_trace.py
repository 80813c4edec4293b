"""`kvbus bench --trace`: notes of all processes become the hops of one handoff."""

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvbus.bench.command import bench
from kvbus.bench.trace.hops import COMPLETED, FETCH, OFFER, traced_hops
from kvbus.bench.trace.recorder import PLACES, Place, Recorder, read_notes, record_module

MS = 1_000_000


def run(*arguments: str) -> Result:
    app = typer.Typer()
    app.command()(bench)
    return CliRunner().invoke(app, ["--json", *arguments])


@pytest.mark.timeout(300)
def test_a_trace_has_hops_of_all_four_processes_between_the_call_and_its_return() -> None:
    result = run("--trace", "--scale", "0.05")

    assert result.exit_code == 0, result.output
    hops = json.loads(result.stdout.splitlines()[-1])["trace"]
    assert {hop["process"] for hop in hops} == {
        "decode engine",
        "decode agent",
        "prefill agent",
        "prefill engine",
    }
    seen = {(hop["process"], hop["what"]): hop["at_us"] for hop in hops}
    assert (
        0
        == seen["decode engine", FETCH]
        < seen["decode agent", "ReadTable: ChunkWanted"]
        < seen["prefill agent", "take: read"]
        < seen["decode engine", COMPLETED]
    )


def test_a_trace_and_a_case_are_not_measured_together() -> None:
    assert run("--trace", "--only", "fixed").exit_code == 2


def test_hops_are_medians_over_handoffs_and_shares_of_the_time_until_the_fetch_is_completed() -> (
    None
):
    began = (0, 100 * MS, 200 * MS)
    agent_took = (1 * MS, 2 * MS, 6 * MS)
    engine = [
        note
        for start, took in zip(began, agent_took, strict=True)
        for note in [(start, FETCH), (start + took + 2 * MS, COMPLETED), (start + 50 * MS, OFFER)]
    ]
    agent = [(start + took, "read") for start, took in zip(began, agent_took, strict=True)]

    hops = traced_hops({"engine": engine, "agent": agent})

    assert [(hop.process, hop.what, hop.at_us, hop.took_us) for hop in hops] == [
        ("engine", FETCH, 0, 0),
        ("agent", "read", 2000, 2000),
        ("engine", COMPLETED, 4000, 2000),
    ]
    assert [hop.share for hop in hops] == [0, 0.5, 0.5]


def test_what_happens_between_the_next_offer_and_its_fetch_is_no_hop() -> None:
    notes = [(0, FETCH), (1 * MS, COMPLETED), (2 * MS, OFFER), (3 * MS, "offer: reply read")]

    assert [hop.what for hop in traced_hops({"engine": notes})] == [FETCH, COMPLETED]


def test_the_first_handoffs_are_skipped_and_rare_hops_left_out() -> None:
    notes = []
    for start, took in ((0, 90), (100, 90), (200, 90), (300, 1), (400, 1), (500, 1)):
        notes += [(start * MS, FETCH), ((start + took) * MS, COMPLETED)]
    notes.append((500 * MS + 1, "heartbeat"))

    hops = traced_hops({"engine": notes}, skip=3)

    assert [(hop.what, hop.at_us) for hop in hops] == [(FETCH, 0), (COMPLETED, 1000)]


def test_a_second_message_of_a_kind_is_a_hop_of_its_own() -> None:
    notes = [(0, FETCH), (1 * MS, "renew: sent"), (2 * MS, "renew: sent"), (3 * MS, COMPLETED)]

    hops = [hop.what for hop in traced_hops({"engine": notes})]

    assert hops == [FETCH, "renew: sent", "renew: sent (2)", COMPLETED]


def test_functions_are_as_before_once_nothing_is_recorded() -> None:
    before = [getattr(place.owner, place.method) for place in PLACES]

    with Recorder().recording():
        during = [getattr(place.owner, place.method) for place in PLACES]

    assert all(one is not other for one, other in zip(before, during, strict=True))
    assert [getattr(place.owner, place.method) for place in PLACES] == before


def test_a_place_is_noted_when_it_begins_or_once_it_has_ended() -> None:
    class Door:
        def knock(self, who: str) -> None:
            recorder.note(f"{who} knocks")

    def named(_: Door, who: str) -> str | None:
        return who or None

    recorder = Recorder()
    for ended in (False, True):
        with recorder.recording([Place(Door, "knock", named, ended)]):
            Door().knock("a guest")
            Door().knock("")

    assert [what for _, what in recorder.notes] == [
        *("a guest", "a guest knocks", " knocks"),
        *("a guest knocks", "a guest", " knocks"),
    ]


def test_a_module_that_ends_leaves_its_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "noting.py").write_text(
        "import sys\n"
        "from kvbus.table import Driver\n"
        "assert sys.argv[1:] == ['argument'], sys.argv\n"
        "class Nothing:\n"
        "    deadline_bound = None\n"
        "    def handle(self, event, now):\n"
        "        return []\n"
        "class Clock:\n"
        "    def time(self):\n"
        "        return 0.0\n"
        "Driver(Nothing(), Clock()).dispatch('event')\n"
        "sys.exit(3)\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "argv", ["before"])

    with pytest.raises(SystemExit, match="3"):
        record_module(tmp_path / "notes", "noting", "argument")

    assert [what for _, what in read_notes(tmp_path / "notes")] == ["Nothing: str"]
