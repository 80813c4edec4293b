"""The connector fits the vLLM that is installed here, as the newest one that was written down."""

from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1.request", reason="needs vLLM: make test-vllm")

from vllm.config import KVTransferConfig

from kvbus.integrations.vllm import KvbusConnector
from tests.integrations.vllm_contract import differences, record

NOT_YET = {"supports_sleep_mode: vLLM does not call it"}
"""What a newer vLLM asks for."""


def test_the_connector_fits_the_vllm_that_is_installed() -> None:
    found = find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parents[1]

    def read(name: str) -> str | None:
        path = root / name
        return path.read_text() if path.is_file() else None

    assert set(differences(record("installed", read))) <= NOT_YET


def test_sleep_mode_is_refused() -> None:
    assert not KvbusConnector.supports_sleep_mode(KVTransferConfig(kv_role="kv_both"))
