"""Child processes: how they are waited for and ended, and that none outlives its parent."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvbus.errors import ConfigError, LocalError, PeerLost
from kvbus.spawn import Child
from tests.support.agents import wait_logged

WITHIN_S = 30.0
Start = Callable[..., Child]
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
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a child that runs some Python, and waits until it is ready if it says so."""
    children: list[Child] = []

    def start(code: str, **options: Any) -> Child:
        log = tmp_path / f"log-{len(children)}"
        command = [sys.executable, "-c", code]
        child = Child.start("child", command, **{"log": log, **options})
        children.append(child)
        if code.startswith((SAY, DEAF)):
            wait_logged(child, "ready", WITHIN_S)
        return child

    yield start
    for child in children:
        child.process.kill()
        child.process.wait()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_ends_with_its_parent_however_that_ends(tmp_path: Path, number: int) -> None:
    """The child ignores SIGTERM, so only the kernel's SIGKILL ends it."""
    command = [sys.executable, "-c", PARENT, DEAF, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))
        end = select.poll()  # it takes any number of a descriptor, `select` none above 1023
        end.register(child, select.POLLIN)

        parent.send_signal(number)

        assert parent.wait(WITHIN_S) == -number
        assert end.poll(WITHIN_S * 1000)
        os.close(child)


def test_a_thread_may_not_start_a_child_which_would_end_with_it(
    start: Start, tmp_path: Path
) -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(LocalError):
        pool.submit(start, HANG).result(WITHIN_S)

    assert not list(tmp_path.iterdir())


def test_stopped_child_is_asked_to_end_and_deaf_one_is_killed(start: Start) -> None:
    deaf, stopped = start(DEAF), start(SAY + HANG)
    reader = start("import sys; sys.stdin.read()", stdin=subprocess.PIPE)
    stopped.process.send_signal(signal.SIGSTOP)
    os.waitpid(stopped.pid, os.WUNTRACED)

    assert deaf.end(within_s=0.1) == -signal.SIGKILL
    assert stopped.end(WITHIN_S) == -signal.SIGTERM
    assert reader.end(WITHIN_S) == 0, "the end of its stdin is enough"
    with start(f"{SAY}sys.stdin.read()", stdin=subprocess.PIPE) as child:
        pass
    assert child.process.returncode == 0
    assert child.process.stdin is not None
    assert child.process.stdin.closed


@pytest.mark.anyio
async def test_the_event_loop_runs_on_while_an_end_is_waited_for(start: Start) -> None:
    ending, deaf = start(HANG), start(DEAF)
    ending.process.kill()

    assert await ending.ended() == await ending.ended() == -signal.SIGKILL
    assert await deaf.end_async(within_s=0.1) == -signal.SIGKILL


def test_errors_name_a_child_that_ended_early_or_was_too_slow(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("of an earlier run\n")
    early, slow = start(f"{SAY}sys.exit('no room')", log=log), start(HANG)

    with pytest.raises(PeerLost) as caught:
        wait_logged(early, "never said", WITHIN_S)
    with pytest.raises(PeerLost, match=r"did not log 'ready' within 0\.1 s; .*\n  \(none\)"):
        wait_logged(slow, "ready", 0.1)
    with pytest.raises(ConfigError, match="/nowhere/log"):
        start(HANG, log=Path("/nowhere/log"))

    assert caught.value.message == (
        f"the child (process {early.pid}) ended with exit status 1;"
        " the last lines of its log:\n  ready\n  no room"
    )


def test_child_gets_environment_without_agents_and_fresh_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python ignores SIGPIPE in itself, but not for what it starts."""
    monkeypatch.setenv("KVBUS_AGENT_ID", "of-the-container")
    code = 'test "$KVBUS_GIVEN-$KVBUS_AGENT_ID" = 1- && grep SigIgn: /proc/self/status'
    command, env = ["sh", "-c", code], {"KVBUS_GIVEN": "1"}
    with Child.start("child", command, log=tmp_path / "log", env=env) as child:
        assert child.process.wait(WITHIN_S) == 0

    assert int(child.log_text().split()[1], 16) & 1 << (signal.SIGPIPE - 1) == 0


@pytest.mark.parametrize("forks", [False, True], ids=["itself", "its child"])
def test_cpu_time_is_that_of_the_child_and_of_its_own_ones(start: Start, forks: bool) -> None:
    begin = (
        f"import ctypes, os\nif os.fork(): {HANG}\nctypes.CDLL(None).prctl(1, 9)\n" if forks else ""
    )
    child = start(f"{begin}import time\nwhile time.process_time() < 0.3: pass\n{SAY}{HANG}")
    wait_logged(child, "ready", WITHIN_S)
    used = child.cpu_s()
    child.end()

    assert 0.25 < used < WITHIN_S
    assert child.cpu_s() == 0
