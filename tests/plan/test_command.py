"""``kvbus plan`` on the command line: what it prints, how it ends, what it refuses."""

from pathlib import Path

import pytest

from tests.plan.planning import SMALL, plan, planned

PATH_KEYS = {
    "seconds",
    "gather_s",
    "read_s",
    "scatter_s",
    "copy_s",
    "descriptors",
    "copied_runs",
    "bytes",
    "over_read_bytes",
    "slot_bytes",
    "scattered_bytes",
    "boxes",
    "box_bytes",
}


def test_the_tables_say_who_reads_what_and_why_so() -> None:
    result = plan(decode=f"tp=2,{SMALL}", tokens=2048)

    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    assert any(line.split()[:5] == ["0", "1", "attention", "0-1", "4-7"] for line in lines)
    assert any(line.startswith("direct") and "16,384" in line for line in lines)
    assert "predicted to be the fastest" in result.stdout
    assert "those of the machine that kvbus is developed on" in result.stdout
    assert max(map(len, lines)) <= 80


def test_the_json_is_the_last_line_and_its_keys_stay() -> None:
    found = planned(decode=f"tp=2,{SMALL}")

    assert set(found) == {
        "from",
        "to",
        "tokens",
        "bytes",
        "reads",
        "unread_ranks",
        "paths",
        "choice",
        "slot_bytes",
        "rates_from",
        "rates",
    }
    assert set(found["from"]) == {"model", "tp", "pp", "axes", "groups"}
    assert set(found["paths"]) == {"direct", "packed", "reordered", "mapped"}
    assert found["paths"].pop("mapped") is None
    assert all(set(path) == PATH_KEYS for path in found["paths"].values())
    assert set(found["choice"]) == {"path", "is_forced", "reason"}
    assert found["reads"][1] == {
        "prefill_rank": 0,
        "decode_rank": 1,
        "group": "attention",
        "layers": [0, 1],
        "parts": ["k", "v"],
        "heads": [4, 8],
        "positions": [0, 32],
        "bytes": 4096,
    }
    assert (found["tokens"], found["bytes"]) == ([0, 32], 8192)
    assert found["paths"]["direct"]["descriptors"] == 256


def test_the_mapped_path_is_shown_for_agents_of_the_same_machine() -> None:
    table = plan("--same-machine", decode=f"tp=2,{SMALL}", tokens=2048).stdout
    found = planned("--same-machine", decode=f"tp=2,{SMALL}", tokens=2048)
    apart = plan(decode=f"tp=2,{SMALL}", tokens=2048).stdout

    mapped = found["paths"]["mapped"]
    assert set(mapped) == PATH_KEYS
    assert (mapped["descriptors"], mapped["copied_runs"]) == (0, 16_384)
    assert (mapped["bytes"], mapped["slot_bytes"], mapped["over_read_bytes"]) == (1 << 19, 0, 0)
    assert mapped["copy_s"] == mapped["seconds"]
    assert found["choice"]["path"] == "mapped"
    assert "16,384 runs of 32 B on average, copied from blocks" in found["choice"]["reason"]
    assert any(line.split()[0:1] == ["mapped"] for line in table.splitlines())
    assert max(map(len, table.splitlines())) <= 80
    assert "mapped" not in apart


def test_what_is_read_once_for_several_ranks_is_said() -> None:
    shown = plan(decode=f"tp=32,{SMALL}", tokens=2048).stdout
    alone = plan(decode=f"tp=8,{SMALL}", tokens=2048).stdout

    line = "packed reads what several decode ranks hold alike once: 512 KiB for 2 MiB"
    assert line in " ".join(shown.split())
    assert "alike" not in alone


def test_the_mapped_path_of_agents_apart_cannot_be_forced() -> None:
    result = plan("--path", "mapped")

    assert result.exit_code == 2
    assert "--path: this handoff cannot take mapped" in result.stderr


def test_a_path_can_be_forced() -> None:
    found = planned("--path", "packed")

    assert (found["choice"]["path"], found["choice"]["is_forced"]) == ("packed", True)
    assert found["choice"]["reason"].startswith("asked for with --path; direct would take")


def test_a_path_that_is_not_possible_is_null_and_cannot_be_forced() -> None:
    assert planned(tokens=0)["paths"]["packed"] is None

    result = plan("--path", "packed", tokens=0)

    assert result.exit_code == 2
    assert result.stderr == "error: --path: this handoff cannot take packed, it can take direct\n"


def test_rates_of_other_machines_change_the_prediction(tmp_path: Path) -> None:
    file = tmp_path / "rates.toml"
    file.write_text("seconds_per_read = 1\nnum_cores = 64\n")

    found = planned("--rates", str(file))

    assert found["paths"]["direct"]["seconds"] > 1
    assert found["rates"]["num_cores"] == 64
    assert found["rates_from"] == str(file)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("speed = 1", "'speed' is not a key"),
        ("num_cores = 1.5", "num_cores=1.5 is not a number of that kind"),
        ("num_cores = true", "num_cores=True is not a number of that kind"),
        ("wire_bytes_per_s = 0", "wire_bytes_per_s is 0"),
        ("wire_bytes_per_s = nan", "wire_bytes_per_s is nan"),
        ("wire_bytes_per_s", "is not TOML"),
    ],
)
def test_wrong_rates_are_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "rates.toml"
    file.write_text(text)

    result = plan("--rates", str(file))

    assert result.exit_code == 2
    assert result.stderr.startswith("error: --rates: ")
    assert told in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_first_token_behind_the_last_is_refused() -> None:
    result = plan("--first-token", "33")

    assert result.exit_code == 2
    assert result.stderr == "error: --first-token: 33 is more than --tokens 32\n"


def test_many_reads_are_counted_below_the_table() -> None:
    result = plan(prefill=f"tp=8,{SMALL}", decode=f"tp=64,{SMALL}")

    assert "and 24 more: --json has them all" in result.stdout
