"""A peer that goes while much of it is unread ends its own connection, and not the process."""

import subprocess
import sys
from itertools import repeat
from pathlib import Path

from tests.agents import WITHIN_S
from tests.security.wire import connected, frame, send_until_cut

SLOW_SERVER = Path(__file__).parent / "processes" / "slow_server.py"
NUM_WIRES = 4
FRAMES = frame(bytes(100)) * 1000
MORE_THAN_IS_READ_BYTES = 256 << 20


def test_who_goes_while_its_queue_is_full_does_not_end_the_process():
    """libzmq 4.3.5 does so when its timer for heartbeats comes round after that: "!_io_error"."""
    with subprocess.Popen(
        [sys.executable, str(SLOW_SERVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        endpoint = server.stdout.readline().strip()
        for _ in range(NUM_WIRES):
            wire = connected(endpoint, "DEALER")
            wire.settimeout(1)  # some beats
            send_until_cut(wire, repeat(FRAMES), most_bytes=MORE_THAN_IS_READ_BYTES)
        connected(endpoint, "DEALER").close()
        said, _ = server.communicate("end\n", timeout=WITHIN_S)

    assert server.returncode == 0
    assert said == "alive\n"
