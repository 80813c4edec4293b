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
import shutil
import signal
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from kvbus.spawn import never_give
from tests.support.agents import AgentProcess, Agents, agents_ended, started
from tests.support.examples import PROFILE, num_examples
from tests.support.moves import enforce_all

phases = [phase for phase in Phase if phase is not Phase.explain]
for name in ("kvbus", "long"):
    settings.register_profile(name, deadline=None, phases=phases, max_examples=num_examples(100))
settings.load_profile(PROFILE)

signal.signal(signal.SIGINT, signal.default_int_handler)

if find_spec("kvbus_decode") and find_spec("kvbus_prefill"):
    enforce_all()

if worker := os.environ.get("PYTEST_XDIST_WORKER"):  # gw0, gw1 and so on
    number, num_workers = int(worker[2:]), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    never_give(port for port in range(1 << 16) if port % num_workers != number % num_workers)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The product needs the asyncio backend."""
    return "asyncio"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path, as Linux allows 107 bytes for a Unix socket's."""
    path = Path(tempfile.mkdtemp(prefix="kv-"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def fresh() -> Iterator[Agents]:
    """Agents of one test; those that live then hold nothing, and have logged no trouble."""
    with agents_ended(Agents) as agents:
        yield agents
        agents.check()


@pytest.fixture(scope="session")
def shared() -> Iterator[Agents]:
    """The agents of tests that have no other wishes; a folder that has some has its own."""
    with started("prefill", "decode") as agents:
        yield agents


@pytest.fixture
def agents(shared: Agents) -> Iterator[Agents]:
    """The shared agents, which must hold nothing after each test."""
    yield shared
    shared.check()


@pytest.fixture
def prefill(agents: Agents) -> AgentProcess:
    """The shared prefill agent."""
    return agents.all[0]


@pytest.fixture
def decode(agents: Agents) -> AgentProcess:
    """The shared decode agent."""
    return agents.all[1]
