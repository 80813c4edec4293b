"""The connector has what vLLM calls, and vLLM what it needs, as the newest one was written down.

Of kvbus it needs what is public: the SDK's own list, errors, geometry and messages.
"""

import copy
import json
from typing import Any

import pytest

import kvbus.engine
from tests.e2e.integrations.vllm_contract import (
    RECORDED,
    differences,
    imports_of,
    needed,
    private_names,
    sources,
)

PUBLIC = ("kvbus.errors", "kvbus.geometry", "kvbus.protocol", "kvbus.integrations")


@pytest.fixture
def recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text())
    return found


def test_the_connector_fits_the_vllm_that_was_written_down(recorded: dict[str, Any]) -> None:
    assert len(recorded["methods"]) > 30
    assert differences(recorded) == []


def test_whatever_does_not_fit_is_named(recorded: dict[str, Any]) -> None:
    other = copy.deepcopy(recorded)
    del other["methods"]["on_new_request"]
    other["methods"]["request_finished"]["parameters"].append("now")
    other["methods"]["build_prom_metrics"]["kinds"] = []
    other["methods"]["start"] = {"parameters": ["self"], "kinds": ["abstractmethod"]}
    other["imports"].remove("vllm.config:VllmConfig")
    other["inside"].remove("vllm.v1.request:Request:_all_token_ids")

    found = [line.partition(":")[0] for line in differences(other)]

    assert sorted(found) == [
        "build_prom_metrics",
        "on_new_request",
        "request_finished",
        "start",
        "vllm.config",
        "vllm.v1.request",
    ]


def test_each_private_name_of_vllm_that_is_used_is_in_the_list() -> None:
    assert private_names() == {name for *_, name in needed() if name.startswith("_")}


def test_the_connector_imports_only_what_kvbus_has_for_engines() -> None:
    found = {pair for source in sources() for pair in imports_of(source, "kvbus")}

    of_sdk = {name for module, name in found if module == "kvbus.engine"}
    others = {module for module, _ in found if not module.startswith(PUBLIC)}

    assert of_sdk <= set(kvbus.engine.__all__)
    assert others == {"kvbus.engine"}
