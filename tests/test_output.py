"""What commands write reaches a reader, or does no harm where there is none."""

import json
import os
import sys

import pytest

from kvbus.output import fail, write_json, write_text


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    write_json({"times_s": (1.5, None)})

    out = capsys.readouterr().out
    assert json.loads(out) == {"times_s": [1.5, None]}
    assert out.count("\n") == 1


def test_a_pipe_without_a_reader_is_no_error_now_nor_when_the_file_is_closed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    stdout = os.fdopen(writing, "w")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        write_text("a line\n")

    stdout.close()

    assert capfd.readouterr().err == ""


def test_a_full_disk_is_told_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:  # noqa: PTH123 - a device
        patch.setattr(sys, "stdout", full)
        write_text("a line\n")

    assert capfd.readouterr().err == ("error: cannot write to stdout: No space left on device\n")


def test_a_stdout_that_is_closed_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        write_text("a line\n")


def test_a_failure_is_one_line_and_its_status(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail("no agent answered", status=7, cause=OSError())

    assert ended.value.code == 7
    assert capfd.readouterr().err == "error: no agent answered\n"
