"""NIXL metadata of an agent that lies is refused, and reads of others go on.

Each of these ended the agent, was logged as a defect, or made NIXL forget another peer.
"""

import subprocess
import sys
from pathlib import Path

from tests.examples import num_examples

SCRIPT = Path(__file__).parent / "processes" / "altered_metadata.py"


def test_a_transport_refuses_altered_metadata_and_still_reads() -> None:
    """In a process of its own, as what is not refused in time ends it."""
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), str(num_examples(2000))],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    *lies, random, read = ended.stdout.splitlines()
    assert ended.returncode == 0
    assert len(lies) == 9
    assert {line.rpartition(": ")[2] for line in lies} == {"transfer_failed"}, lies
    assert (random, read) == ("random: refused", "read")
