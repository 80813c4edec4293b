"""The connector fits the vLLM that is installed here, as the newest one that was written down."""

from importlib.util import find_spec
from pathlib import Path

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
