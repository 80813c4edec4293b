"""Real vLLM servers; every test here is skipped, and says why, where vLLM is not installed."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.vllm.models import written
from tests.vllm.wirings import WIRES, Wire

HERE = Path(__file__).parent
TIMEOUT_S = 600
"""For one test with the start of its servers."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Run the tests with vLLM's own connector, too: `pytest tests/vllm --wire nixl`."""
    parser.addoption("--wire", choices=sorted(WIRES), default="kvbus", help="who moves the KV")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Servers take their time; vLLM, where a test imports it, warns of itself and others."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S), append=False)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def _vllm() -> None:
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here: make test-vllm runs this")


@pytest.fixture(scope="session")
def wire(_vllm: None, request: pytest.FixtureRequest) -> Wire:
    """Who moves the KV between two servers."""
    return WIRES[request.config.getoption("--wire", default="kvbus")]


@pytest.fixture(scope="session")
def models(_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the models, one folder each."""
    return written(tmp_path_factory.mktemp("models"))
