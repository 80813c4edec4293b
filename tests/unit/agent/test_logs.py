"""Lines of the log: one JSON object each, with the time in UTC and fields of the process."""

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from functools import cache

import pytest

HEAD = """
import asyncio, fcntl, json, logging, os, sys, threading
import structlog
from kvbus.agent.observe import AgentMetrics, configure_logs
def configure(style="json"):
    return configure_logs(level="info", style=style, agent="name"), structlog.get_logger()
def num_lost():
    return AgentMetrics().registry.get_sample_value("kvbus_lost_log_lines_total")
"""


def run(program: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", HEAD + program]
    return subprocess.run(command, capture_output=True, check=True, timeout=60)


PROGRAM = """
flush, log = configure("{style}")
log.debug("nothing.said")
log.info("handoff.completed", request_id="\\u00fc", total_ms=1.5)
for peer in ("tcp", "a\\x1b[2J\\u202e\\x9bb", "\\udc80"):
    log.warning("peer.lost", peer=peer)
"""


@cache
def lines(style: str) -> list[str]:
    return run(PROGRAM.format(style=style)).stderr.decode().splitlines()


def test_log_line_is_object_with_level_agent_and_utc_time() -> None:
    first, second, *_ = (json.loads(line) for line in lines("json"))
    at = datetime.fromisoformat(first.pop("timestamp"))
    assert timedelta(0) <= datetime.now(UTC) - at < timedelta(hours=1)
    fields = {"level": "info", "agent": "name", "request_id": "ü", "total_ms": 1.5}
    assert first == {"event": "handoff.completed", **fields}
    assert (second["event"], second["level"]) == ("peer.lost", "warning")
    assert second["timestamp"].endswith("Z")


@pytest.mark.parametrize("style", ["console", "json", "auto"])
def test_every_log_style_says_same_and_keeps_unencodable_lines(style: str) -> None:
    assert ["handoff.completed" in line for line in lines(style)] == [True, *[False] * 3]


@pytest.mark.parametrize("style", ["console", "json"])
def test_what_a_name_would_tell_a_terminal_is_escaped(style: str) -> None:
    _, plain, line, _ = lines(style)
    ours = {one for one in plain if not one.isprintable()}
    assert {one for one in line if not one.isprintable()} <= ours
    assert "a\\u001b[2J\\u202e\\u009bb" in line.replace("\\\\", "\\")
    assert "\x1b[2J" not in line


FULL_DISK = """
reading, writing = os.pipe()
os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
flush, log = configure()
log.info("first")
log.warning("second")
flush()
os.dup2(writing, 2)
log.info("third")
print(num_lost())
with os.fdopen(reading) as lines:
    for event in "third", "lines.lost":
        line = json.loads(next(lines))
        print(line["event"])
print(line["num_lines"])
"""


def test_lines_lost_to_full_disk_are_counted_and_next_is_whole() -> None:
    assert run(FULL_DISK).stdout.decode().split() == ["2", "third", "lines.lost", "2"]


FULL_PIPE = """
reading, writing = os.pipe()
fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
os.write(writing, b"*" * 4095 + b"\\n")
os.dup2(writing, 2)
flush, log = configure()
logging.getLogger("library").warning("of a library")
for number in range(100):
    log.warning("long", number=number, text="-" * 100_000)
print(num_lost())
with os.fdopen(reading) as file:
    next(file)
    print(next(file).strip())
    numbers = []
    while (line := json.loads(next(file)))["event"] == "long":
        numbers.append(line["number"])
    print(numbers == list(range(len(numbers))), 100 - len(numbers))
    print(line["event"], line["num_lines"])
    log.info("next")
    flush()
    print(json.loads(next(file))["event"])
"""


def test_full_pipe_blocks_no_caller_and_reports_lost_lines_once() -> None:
    metric, library, order, event, after = run(FULL_PIPE).stdout.decode().splitlines()
    num_lost = round(float(metric))
    assert num_lost > 0
    assert library == "of a library"
    assert order == f"True {num_lost}"
    assert (event, after) == (f"lines.lost {num_lost}", "next")


IN_A_LOOP = """
flush, log = configure()
async def main():
    log.info("first")
    log.info("second")
    thread = threading.Thread(target=log.info, args=["third"])
    thread.start()
    thread.join()
    log.info("fourth")
    log.info("fifth")
asyncio.new_event_loop().run_until_complete(main())
log.info("sixth")
flush()
"""


def test_lines_of_loop_and_threads_keep_order_and_none_is_lost() -> None:
    events = [json.loads(line)["event"] for line in run(IN_A_LOOP).stderr.splitlines()]
    assert events == ["first", "second", "third", "fourth", "fifth", "sixth"]
