"""The options of the connector for vLLM."""

from pathlib import Path
from typing import Any

import pytest

from kvbus.errors import ConfigError
from kvbus.integrations.vllm.params import read_options
from kvbus.protocol import AgentRole

BOTH = {"prefill": "/run/p.sock", "decode": "unix:///run/d.sock"}


def test_an_endpoint_for_each_kind_of_agent_offers_with_the_one_and_loads_with_the_other() -> None:
    options = read_options({"endpoint": BOTH, "bidirectional_kv_xfer": True})

    assert options.agents == (
        (Path("/run/p.sock"), AgentRole.PREFILL),
        (Path("/run/d.sock"), AgentRole.DECODE),
    )


@pytest.mark.parametrize(
    ("extra", "kv_role", "what_to_do"),
    [
        ({"endpoint": "/a", "bidirectional_kv_xfer": True}, "kv_both", "give endpoint as"),
        (
            {"endpoint": {"prefill": "/a", "decode": "unix:///a"}},
            "kv_both",
            "start a kvbus-prefill",
        ),
        ({"endpoint": BOTH}, "kv_producer", "set it to kv_both"),
    ],
)
def test_agents_that_do_not_fit_are_refused_with_what_to_do(
    extra: dict[str, Any], kv_role: str, what_to_do: str
) -> None:
    with pytest.raises(ConfigError, match=what_to_do):
        read_options(extra, kv_role)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({}, "endpoint"),
        ({"endpoint": 7}, "endpoint"),
        ({"endpoint": {"prefill": "/a"}}, "endpoint"),
        ({"endpoint": BOTH, "decoder_kv_blocks_share": 1.5}, "decoder_kv_blocks_share"),
        ({"endpoint": "/a", "endpiont": "/b"}, "endpiont"),
        ({"endpoint": "/a", "attach_timeout_s": -1}, "attach_timeout_s"),
    ],
)
def test_wrong_options_are_refused_by_name(extra: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"{named}.*knows endpoint, model_id"):
        read_options(extra)
