"""What an agent imports when it starts; what it imports later shows in `tests/process`."""

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, sys, {module}
from kvbus.agent.observe import configure_logs
configure_logs(level="info", style="console", agent="a")
print(json.dumps([name for name in ("torch", "rich.console") if name in sys.modules]))
"""


@pytest.mark.parametrize("module", ["kvbus_prefill.__main__", "kvbus_decode.__main__"])
def test_an_agent_starts_without_torch_and_without_rich(module: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(module=module)]

    found = subprocess.run(program, check=True, capture_output=True, text=True, timeout=60)

    assert json.loads(found.stdout) == []
