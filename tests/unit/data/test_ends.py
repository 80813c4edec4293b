"""How a data process ends, and that nothing of it lands afterwards."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvbus.data import messages as wire
from tests.support.agents import wait_until
from tests.support.data_process import MIB, WITHIN_S, Data
from tests.unit.data.conftest import MakePair, Start

CANARY = 0xA5
PARENT = """
import os, socket, subprocess, sys
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
child = subprocess.Popen([sys.executable, "-m", "kvbus.data", "0"], stdin=theirs)
theirs.close()
with socket.socket(fileno=0) as out:
    socket.send_fds(out, [str(child.pid).encode()], [ours.fileno()])
    out.recv(1)
"""


def test_process_ends_with_its_parent_while_channel_is_open() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            parent = subprocess.Popen([sys.executable, "-c", PARENT], stdin=theirs.fileno())
        pid, (channel,), _, _ = socket.recv_fds(ours, 16, 1)
        pidfd = os.pidfd_open(int(pid))
        with socket.socket(fileno=channel) as held:
            parent.kill()
            parent.wait()
            signalled = bool(select.select([pidfd], [], [], WITHIN_S)[0])
            assert held.recv(1 << 10) == b""
        os.close(pidfd)

    assert signalled


def test_process_does_not_start_if_parent_did_not_make_channel() -> None:
    """Its true parent has ended, so another process is its parent."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    start = "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], stdin=0))"
    command = [sys.executable, "-c", start, sys.executable, "-m", "kvbus.data", "0"]
    with ours, theirs:
        ended = subprocess.run(command, stdin=theirs.fileno(), timeout=WITHIN_S, check=False)
    assert ended.returncode == 0


def test_signals_that_end_an_agent_leave_it_running(start: Start) -> None:
    data = start()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        data.process.send_signal(number)
    assert data.call(wire.Barrier()) is None


def test_defect_ends_process_with_trace_in_log_and_on_stderr(start: Start, folder: Path) -> None:
    with (folder / "stderr").open("wb") as stderr:
        data: Data = start(stderr=stderr)
        data.channel.send(wire.Barrier())
        data.send_raw(b"\0\x01")
        status = data.process.wait(WITHIN_S)
        while data.receive():
            pass
    (line,) = [one for one in data.notices if isinstance(one, wire.Log)]
    assert (status, line.event) == (1, "data.broken")
    assert "ValidationError" in str(line.fields["trace"])
    assert "ValidationError" in (folder / "stderr").read_text()


@pytest.mark.parametrize("is_killed", [True, False])
def test_nothing_lands_after_its_end(make_pair: MakePair, is_killed: bool) -> None:
    pair = make_pair(64, MIB, tls="tcp")
    pair.read_of_stopped()
    if is_killed:
        pair.reader.end()
    else:
        pair.reader.channel.close()
        assert pair.reader.process.wait(WITHIN_S) == 0
    pair.ours.content[:] = CANARY
    pair.holder.go_on()
    answered = pair.holder.send(wire.Barrier())
    pair.holder.until(lambda: answered in pair.holder.replies or pair.holder.has_hung_up)
    assert bool(np.all(pair.ours.content == CANARY))


def test_a_descriptor_that_it_inherits_stays_open_until_it_ends(start: Start) -> None:
    ours, theirs = os.pipe()
    data = start(forked=False, pass_fds=(theirs,))
    os.close(theirs)
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        os.read(ours, 1)
    data.process.kill()
    wait_until(lambda: _is_at_end(ours), what="the pipe has ended")
    os.close(ours)


def _is_at_end(fd: int) -> bool:
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return False


LAZY = "nixl torch asyncio anyio zmq structlog prometheus_client"


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        ("kvbus.data.loop", LAZY),
        ("kvbus.data.client, kvbus.data.child, kvbus.data.metadata", "nixl torch"),
    ],
    ids=["data process", "control process"],
)
def test_importing_it_loads_no_library_that_it_may_not_need(modules: str, unwanted: str) -> None:
    code = f"""
import sys
import {modules}
loaded = {{name.partition(".")[0] for name in sys.modules}}
sys.exit(" ".join(loaded & set("{unwanted}".split())))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert not ended.stderr.strip()


def test_process_ends_when_channel_closes_despite_endless_read(
    make_pair: MakePair,
) -> None:
    pair = make_pair(64, MIB, tls="tcp")
    assert pair.can_read()
    pair.holder.stop()
    pair.read_all()
    pair.reader.call(wire.Barrier())

    pair.reader.channel.close()

    assert pair.reader.process.wait(WITHIN_S) == 0
