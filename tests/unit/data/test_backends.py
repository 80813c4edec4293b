"""Backends of NIXL: READs with another one than UCX, and backends that a process cannot use."""

import os
import subprocess
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from kvbus.data import messages as wire
from kvbus.errors import ConfigError, TransferFailed
from tests.support.nixl_plugins import BROKEN, TWIN, plugin_environment
from tests.unit.data.conftest import MakeMemory, Start, opened

NUM_BLOCKS, BLOCK_BYTES = 64, 16 << 10
BOTH: wire.Backends = {"UCX": {}, TWIN: {"num_workers": "1"}}


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    return plugin_environment(tmp_path_factory.mktemp("plugins"))


@pytest.mark.parametrize("backend", ["UCX", TWIN])
def test_read_with_one_of_two_shared_backends(
    start: Start, memory: MakeMemory, plugins: Mapping[str, str], backend: str
) -> None:
    holder = opened(start("holder", env=plugins, backends=BOTH))
    reader = start("reader", env=plugins, backends={TWIN: {}, "UCX": {}})
    reader.call(wire.OpenNixl())
    theirs, ours = memory(NUM_BLOCKS, BLOCK_BYTES, seed=1), memory(NUM_BLOCKS, BLOCK_BYTES)
    reader.add(1, ours)

    held = holder.hold(1, theirs, backend=backend)
    reader.meet(held, 1, 1)
    reader.result(reader.read(1, range(NUM_BLOCKS), range(NUM_BLOCKS)))

    assert np.array_equal(ours.content, theirs.content)
    names = {name for blob in held.metadata for name in ("UCX", TWIN) if name.encode() in blob}
    assert names == {backend}


def test_metadata_of_a_backend_that_the_reader_lacks_is_refused(
    start: Start, memory: MakeMemory, plugins: Mapping[str, str]
) -> None:
    holder = opened(start("holder", env=plugins, backends=BOTH))
    reader = opened(start("reader", env=plugins))
    held = holder.hold(1, memory(NUM_BLOCKS, BLOCK_BYTES, seed=1), backend=TWIN)

    with pytest.raises(TransferFailed, match=f"no NIXL backend {TWIN}"):
        reader.call(wire.AddPeer(peer="holder", metadata=held.metadata))

    reader.add(1, memory(NUM_BLOCKS, BLOCK_BYTES))  # it goes on
    reader.meet(holder.hold(2, memory(NUM_BLOCKS, BLOCK_BYTES, seed=2)), 1, 1)
    reader.result(reader.read(1, [0], [0]))


UNUSABLE = [
    ({"UCX": {}, "Mooncake": {}}, r"'Mooncake' cannot be loaded: NIXL has no plugin .* has .*UCX"),
    ({BROKEN: {}}, rf"'{BROKEN}' cannot be loaded: .*libplugin_{BROKEN}\.so: file too short.*UCX"),
    ({"POSIX": {}}, "'POSIX' is for storage .*FILE"),
    (
        {"UCX": {"num_worker": "1"}},
        "'nixl_backend_params': .*'UCX' has no num_worker; .*num_workers",
    ),
]


@pytest.mark.parametrize(("backends", "reason"), UNUSABLE, ids=[str(one[0]) for one in UNUSABLE])
def test_unusable_backend_is_named_with_its_reason(
    start: Start, plugins: Mapping[str, str], backends: wire.Backends, reason: str
) -> None:
    data = start(env=plugins, backends=backends)

    for request in (wire.CheckBackends(), wire.OpenNixl(), wire.OpenNixl()):
        with pytest.raises(ConfigError, match=reason):
            data.call(request)


def test_wrong_value_of_a_parameter_fails_the_opening_by_name(start: Start) -> None:
    data = start(backends={"UCX": {"num_workers": "many"}})

    data.call(wire.CheckBackends())
    with pytest.raises(TransferFailed, match="no NIXL backend UCX num_workers=many"):
        data.call(wire.OpenNixl())


ENVIRONMENT = """
import os
from kvbus.data import nixl_agent
nixl_agent.load()("agent")
names = "UCX_MEMTYPE_CACHE", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "UCX_TCP_CONN_NB"
print(*(os.environ.get(name, "-") for name in names), sep=",")
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "n,-,y"), ({"UCX_MEMTYPE_CACHE": "y", "UCX_TCP_CONN_NB": "n"}, "y,-,n")],
)
def test_ucx_settings_are_defaults_and_ucx_warns_of_none(
    given: dict[str, str], expected: str
) -> None:
    """Without a driver, UCX has no CUDA, and would warn of its variable."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    command = [sys.executable, "-c", ENVIRONMENT]
    ended = subprocess.run(
        command,
        env={**env, "UCX_LOG_LEVEL": "warn", "UCX_NET_DEVICES": "lo", **given},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert ended.stdout.splitlines()[-1] == expected
    assert "UCX" not in ended.stdout.replace(expected, "") + ended.stderr
