"""Probe processes that go wrong: hang, crash, end early, answer nonsense, or leave their parent.

misbehaving hang             says its pid where MISBEHAVE_AT says, and never ends
misbehaving crash            dies of a signal
misbehaving target           as MISBEHAVE says
misbehaving reader           takes a line, and answers it; without one, it fails
"""

import os
import signal
import sys
from pathlib import Path


def hang() -> None:
    Path(os.environ["MISBEHAVE_AT"]).write_text(f"{os.getpid()}\n")
    while True:
        signal.pause()


def target() -> None:
    how = os.environ.get("MISBEHAVE", "")
    if how == "refuse":
        sys.exit("the target has no memory")
    sys.stdout.write("a line\n")
    sys.stdout.flush()
    if how == "stay":
        hang()
    sys.stdin.read()
    if how == "complain":
        sys.exit("the reader went away")


def reader() -> None:
    line = sys.stdin.readline()
    while os.environ.get("MISBEHAVE") == "complain":
        signal.pause()
    if not line or os.environ.get("MISBEHAVE") == "stay":
        sys.exit("the reader has no line")
    sys.stdout.write(f"read {line}")


if __name__ == "__main__":
    match sys.argv[1]:
        case "hang":
            hang()
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "fail":
            sys.exit("it is broken")
        case "target":
            target()
        case "reader":
            reader()
