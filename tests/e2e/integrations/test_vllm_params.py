"""What routers carry between two vLLMs, and the options of the connector."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbus.engine import prompt_digest
from kvbus.errors import ConfigError, ProtocolError
from kvbus.geometry import BlockTable
from kvbus.integrations.vllm.params import (
    HandoffParams,
    adapter_of,
    ranks_elsewhere,
    read_offer_params,
    read_options,
    read_params,
    read_trace,
)
from kvbus.protocol import AgentRanks, AgentRole, Ticket

BOTH = {"prefill": "/run/p.sock", "decode": "unix:///run/d.sock"}
TICKET = Ticket(
    "agent", "boot", "tcp://127.0.0.1:1", "engine", "boot", "offer", "request", 0, 32 * "0"
)


def params() -> dict[str, Any]:
    return HandoffParams(TICKET.to_json(), 40, prompt_digest([1, 2], [])).to_params()


def test_params_travel_as_json_and_come_back_equal() -> None:
    carried = json.loads(json.dumps(params()))

    assert read_params(carried).to_params() == params()


def test_params_written_by_older_vllm_match_their_prompt() -> None:
    """As between servers of unlike versions; they were written down in vLLM 0.32.0."""
    written = json.loads(Path(__file__).with_name("vllm_params.json").read_text())

    handoff = read_params(written["params"])

    no_lora = ""
    assert handoff.remote_num_tokens == len(written["prompt"])
    assert handoff.prompt_digest == prompt_digest(written["prompt"], [no_lora])
    assert Ticket.from_json(handoff.ticket).tables() == {"full": BlockTable.of([7, 3, 9])}


def test_params_with_keys_of_router_or_engine_are_accepted() -> None:
    assert read_params({**params(), "remote_prefill_cached_tokens": 0}).remote_num_tokens == 40


@pytest.mark.parametrize("readers", [0, 257, "2", 1.5])
def test_ticket_is_for_one_reader_or_routers_number_else_refused(readers: object) -> None:
    assert [read_offer_params(said).readers for said in ({}, {"readers": 3})] == [1, 3]
    with pytest.raises(ProtocolError, match="readers"):
        read_offer_params({"readers": readers})


def test_trace_comes_from_request_headers_or_from_router() -> None:
    headers, routers = (f"00-{letter * 32}-{letter * 16}-01" for letter in "ab")

    assert read_trace({"traceparent": routers}, {"traceparent": headers}) == headers
    assert read_trace({"traceparent": routers}, None) == routers
    assert read_trace({"traceparent": routers}, {"traceparent": "wrong"}) == routers
    assert read_trace({"traceparent": 7}, {}) == ""
    assert read_trace({}, None) == ""


def test_endpoint_pair_offers_with_prefill_and_loads_with_decode() -> None:
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


def place(rank: int, agent: int) -> AgentRanks:
    """Agent 0 is one that is not there."""
    endpoint = f"tcp://10.0.0.{agent}:7711" if agent else ""
    return AgentRanks(endpoint, (rank,), f"{16 * 'a'}{rank}", f"key{agent}")


@pytest.mark.parametrize(
    ("agents", "elsewhere"),
    [((1, 1, 2, 2, 3, 3), {2: (2, 3), 3: (4, 5)}), ((1, 0), {}), ((0, 1), {})],
    ids=["three agents", "none beside the second", "none beside the first"],
)
def test_ranks_of_agent_other_than_first_one_are_elsewhere(
    agents: tuple[int, ...], elsewhere: dict[int, tuple[int, ...]]
) -> None:
    workers = [place(rank, agent) for rank, agent in enumerate(agents)]

    wanted = [
        AgentRanks(f"tcp://10.0.0.{agent}:7711", ranks, f"{16 * 'a'}{ranks[0]}", f"key{agent}")
        for agent, ranks in elsewhere.items()
    ]
    assert ranks_elsewhere(workers) == wanted


def test_adapters_differ_by_weights_and_scaling_alone(tmp_path: Path) -> None:
    def digest(name: str, weights: bytes, **config: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(weights)
        (folder / "adapter_config.json").write_text(json.dumps(config))
        request: Any = SimpleNamespace(lora_request=SimpleNamespace(lora_path=str(folder)))
        return adapter_of(request)

    weights = bytes(range(256)) * 4096
    one = digest("one", weights, lora_alpha=8, base_model_name_or_path="/here")

    assert one == digest("two", weights, lora_alpha=8, base_model_name_or_path="/there")
    others = [
        digest("scaled", weights, lora_alpha=16),
        digest("trained", weights[::-1], lora_alpha=8),
        digest("longer", weights + b"0", lora_alpha=8),
    ]
    assert len({one, *others}) == 4
    elsewhere: Any = SimpleNamespace(lora_request=SimpleNamespace(lora_path="a/hub/name"))
    assert adapter_of(elsewhere) == ""
