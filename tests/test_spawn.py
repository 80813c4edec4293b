"""Child processes: how they are waited for and ended, and that none outlives its parent."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbus import spawn
from kvbus.errors import ConfigError, LocalError, PeerLost
from kvbus.spawn import Child
from tests.agents import wait_logged

WITHIN_S = 30.0
SAY = "import sys; print('ready', flush=True); "
HANG = "import signal; signal.pause()"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SAY}{HANG}"
PARENT = f"""
import sys, time
from pathlib import Path
from kvbus.spawn import Child
child = Child.start("child", [sys.executable, "-c", sys.argv[1]], log=Path(sys.argv[2]))
while "ready" not in child.log_text():
    time.sleep(0.01)
print(child.pid, flush=True)
{HANG}
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.process.kill()
        child.process.wait()


def start(children: list[Child], code: str, **options: object) -> Child:
    options.setdefault("log", Path(os.devnull))
    children.append(Child.start("child", [sys.executable, "-c", code], **options))  # type: ignore[arg-type]
    return children[-1]


def has_ended(pid: int) -> bool:
    """Whether the process ends in time; one that is gone has."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    ended = bool(poll.poll(round(WITHIN_S * 1000)))
    os.close(fd)
    return ended


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent_however_that_ends(log: Path, number: int) -> None:
    """The child ignores SIGTERM, so only the kernel's SIGKILL ends it."""
    command = [sys.executable, "-c", PARENT, DEAF, str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())

        parent.send_signal(number)

        assert parent.wait(WITHIN_S) == -number
        assert has_ended(pid)


def test_a_child_whose_parent_ended_before_it_asked_to_end_with_it_does_not_run(log: Path) -> None:
    another = str(os.getppid())

    ended = subprocess.run(
        [sys.executable, "-c", spawn._LAUNCHER, another, "touch", str(log)],
        stderr=subprocess.PIPE,
        timeout=WITHIN_S,
        check=False,
    )

    assert (ended.returncode, ended.stderr) == (1, b"who started this process has ended\n")
    assert not log.exists()


def test_a_thread_may_not_start_a_child_which_would_end_with_it(children: list[Child]) -> None:
    refused: list[LocalError] = []

    def start_one() -> None:
        try:
            start(children, HANG)
        except LocalError as error:
            refused.append(error)

    thread = threading.Thread(target=start_one)
    thread.start()
    thread.join(WITHIN_S)

    assert len(refused) == 1
    assert children == []


def test_a_child_that_does_not_end_when_it_is_asked_to_is_killed(
    children: list[Child], log: Path
) -> None:
    child = start(children, DEAF, log=log)
    wait_logged(child, "ready", WITHIN_S)

    assert child.end(within_s=0.1) == -signal.SIGKILL


def test_a_stopped_child_hears_that_it_shall_end(children: list[Child], log: Path) -> None:
    child = start(children, SAY + HANG, log=log)
    wait_logged(child, "ready", WITHIN_S)
    child.process.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)

    assert child.end(WITHIN_S) == -signal.SIGTERM


def test_a_child_with_a_pipe_for_its_stdin_is_asked_to_end_by_the_end_of_that(
    children: list[Child],
) -> None:
    child = start(children, "import sys; sys.stdin.read()", stdin=subprocess.PIPE)

    assert child.end(WITHIN_S) == 0


def test_a_child_ends_with_its_block_and_its_pipes_are_closed(log: Path) -> None:
    pipe, command = subprocess.PIPE, [sys.executable, "-c", f"{SAY}sys.stdin.read()"]

    with Child.start("child", command, log=log, stdin=pipe, stdout=pipe) as child:
        assert child.process.stdout is not None
        assert child.process.stdout.readline() == b"ready\n"

    assert child.process.returncode == 0
    assert child.process.stdin is not None
    assert child.process.stdin.closed
    assert child.process.stdout.closed


@pytest.mark.anyio
async def test_the_event_loop_runs_on_while_an_end_is_waited_for(
    children: list[Child], log: Path
) -> None:
    ending, deaf = start(children, HANG), start(children, DEAF, log=log)
    wait_logged(deaf, "ready", WITHIN_S)
    ending.process.kill()

    assert await ending.ended() == await ending.ended() == -signal.SIGKILL
    assert await deaf.end_async(within_s=0.1) == -signal.SIGKILL


def test_a_child_that_ends_early_is_told_with_its_end_and_its_last_lines(
    children: list[Child], log: Path
) -> None:
    log.write_text("of an earlier run\n")
    child = start(children, f"{SAY}sys.exit('no room')", log=log)

    with pytest.raises(PeerLost) as caught:
        wait_logged(child, "never said", WITHIN_S)

    assert caught.value.message == (
        f"the child (process {child.pid}) ended with exit status 1;"
        " the last lines of its log:\n  ready\n  no room"
    )


def test_a_child_that_is_too_slow_is_told_so(children: list[Child], log: Path) -> None:
    child = start(children, HANG, log=log)

    with pytest.raises(PeerLost, match=r"did not log 'ready' within 0\.1 s; .*\n  \(none\)"):
        wait_logged(child, "ready", 0.1)


def test_a_log_that_cannot_be_written_is_named(children: list[Child]) -> None:
    with pytest.raises(ConfigError, match="/nowhere/log"):
        start(children, HANG, log=Path("/nowhere/log"))


def test_a_child_inherits_the_environment_and_the_signals_of_a_new_process(
    children: list[Child], log: Path
) -> None:
    """Python ignores SIGPIPE in itself, but not for what it starts."""
    code = "test $KEY = value && grep SigIgn: /proc/self/status"
    child = Child.start("child", ["sh", "-c", code], log=log, env={"KEY": "value"})
    children.append(child)

    assert child.process.wait(WITHIN_S) == 0
    assert int(child.log_text().split()[1], 16) & 1 << (signal.SIGPIPE - 1) == 0


def test_cpu_time_is_that_of_the_child(children: list[Child], log: Path) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\n"
    child = start(children, f"{busy}{SAY}{HANG}", log=log)
    wait_logged(child, "ready", WITHIN_S)
    used = child.cpu_s()
    child.end()

    assert 0.25 < used < WITHIN_S
    assert child.cpu_s() == 0


def test_a_child_is_not_configured_by_the_environment_of_an_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBUS_AGENT_ID", "of-the-container")
    command = [sys.executable, "-c", "import os; print(*sorted(os.environ))"]

    with Child.start("printer", command, log=tmp_path / "log", env={"KVBUS_GIVEN": "1"}) as child:
        child.process.wait(20)

        assert "KVBUS_GIVEN" in child.log_text().split()
        assert "KVBUS_AGENT_ID" not in child.log_text().split()
