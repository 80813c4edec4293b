"""The import of torch for the first copy: nothing else waits for it any longer than it must."""

import subprocess
import sys

PROGRAM = """
import sys
from pathlib import Path
from kvbus.agent.staging import copiers

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(copiers.LARGEST_LIBRARY in Path("/proc/self/maps").read_text())

sys.meta_path.insert(0, Watch())
copiers._import_torch()
print("torch" in sys.modules)
"""


def test_the_largest_library_of_torch_is_there_before_the_import_that_would_hold_all_threads() -> (
    None
):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=100
    )

    looked_for, imported, is_there = done.stdout.split()
    assert (looked_for, imported, is_there) == ("False", "True", "True")
