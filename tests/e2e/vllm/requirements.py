"""What vLLM's wheel requires, as `make test-vllm` installs it: torch and three more left out.

Refuses to list anything itself: the wheel's own metadata is the list. It names a torch build that
only one index has, which constraints.txt pins as everybody has it. torchvision, torchaudio and
torchcodec have no build for that torch, and nothing that the tests run needs them.
"""

import sys
from importlib.metadata import PathDistribution
from zipfile import Path

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def required(wheel: str) -> list[str]:
    """The requirements of a wheel, extras and those left out excepted."""
    (metadata,) = (path for path in Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    wanted = (Requirement(line) for line in PathDistribution(metadata).requires or ())
    return [
        str(one)
        for one in wanted
        if one.name not in LEFT_OUT and "extra" not in str(one.marker or "")
    ]


if __name__ == "__main__":
    print(*required(sys.argv[1]), sep="\n")
