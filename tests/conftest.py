"""What all tests share: how Hypothesis works here, that Ctrl-C works, and whose ports are whose.

A failure is shrunk, but not explained: explaining traces every line, which takes longer than a test
may, and the timeout would hide what failed. An example has no deadline: on a busy machine it may
wait for a core. The environment's HYPOTHESIS_PROFILE chooses the profile: ``kvbus``, which is the
default, or ``long``, which draws four times as many examples.

A shell without job control starts its background commands with SIGINT ignored, and so are the
processes of tests that send it: it is restored here.

Where pytest-xdist runs tests side by side, a port that one of its processes has given to an agent
is not seen until the agent listens: each process has ports of its own.
"""

import os
import signal

from hypothesis import Phase, settings

from kvbus import spawn
from tests.examples import PROFILE, num_examples

phases = [phase for phase in Phase if phase is not Phase.explain]
for name in ("kvbus", "long"):
    settings.register_profile(name, deadline=None, phases=phases, max_examples=num_examples(100))
settings.load_profile(PROFILE)

signal.signal(signal.SIGINT, signal.default_int_handler)

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # gw0, gw1 and so on
    number, num_workers = int(worker[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    others = (port for port in range(1 << 16) if port % num_workers != number % num_workers)
    spawn._GIVEN_PORTS.update(others)
