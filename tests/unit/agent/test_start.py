"""What an agent imports when it starts; what it imports later shows in `tests/process/handoffs`."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys
import kvbus_decode.__main__, kvbus_prefill.__main__
from kvbus.agent.observe import configure_logs
configure_logs(level="info", style="console", agent="a")
print(json.dumps([name for name in ("torch", "rich.console") if name in sys.modules]))
"""


def test_agents_start_without_torch_and_without_rich() -> None:
    program = [sys.executable, "-c", PROGRAM]

    found = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60)

    assert json.loads(found.stdout) == []
