"""The options of the connector for vLLM."""

from pathlib import Path
from typing import Any

import pytest

from kvbus.errors import ConfigError
from kvbus.integrations.vllm.options import read_options


@pytest.mark.parametrize("endpoint", ["/run/a.sock", "unix:///run/a.sock"])
def test_the_endpoint_is_a_path_or_its_url(endpoint: str) -> None:
    assert read_options({"endpoint": endpoint}).attach_path == Path("/run/a.sock")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "endpoint"),
        ({"endpoint": ""}, "endpoint"),
        ({"endpoint": 7}, "endpoint"),
        ({"endpoint": "/a", "endpiont": "/b"}, "endpiont"),
        ({"endpoint": "/a", "fetch_timeout_s": 0}, "fetch_timeout_s"),
        ({"endpoint": "/a", "attach_timeout_s": -1}, "attach_timeout_s"),
    ],
)
def test_wrong_options_are_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}.*knows endpoint, model_id"):
        read_options(extra)
