"""A process that says which GPUs torch sees.

Refuses with exit status 1, and the reason on stderr, when it sees none.
"""

import sys

import msgspec

from kvbus.doctor.probe.cuda import Seen
from kvbus.doctor.probe.native import die_with_parent
from kvbus.memory.cuda_survey import cuda_version, seen_gpus


def main() -> None:
    """Look, and tell."""
    try:
        gpus = [(gpu.uuid, gpu.name, gpu.memory_bytes) for gpu in seen_gpus()]
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built with CUDA
        sys.exit(" ".join(str(error).split()))
    sys.stdout.write(msgspec.json.encode(Seen(cuda_version(), gpus)).decode() + "\n")


if __name__ == "__main__":
    die_with_parent()
    main()
