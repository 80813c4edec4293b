"""What Ray's builder gets from ours; no cluster is needed for it."""

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = [
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed here"),
    pytest.mark.filterwarnings("ignore"),  # of Ray's own imports
]

SIDES = ("prefill_config", "decode_config")


def test_a_configuration_that_both_sides_share_is_of_neither_and_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from ray.serve.llm import LLMConfig

    from kvbus.integrations.ray import builder

    monkeypatch.setattr(builder, "ray_build_pd_openai_app", lambda args: args)
    model = {"model_id": "m", "model_source": "/m"}
    shared: dict[str, Any] = {"kv_transfer_config": {"kv_connector_extra_config": {}}}
    configs = [LLMConfig(model_loading_config=model, engine_kwargs=shared) for _ in SIDES]

    built = builder.build_pd_openai_app(dict(zip(SIDES, configs, strict=True)))

    roles = [built[side].engine_kwargs["kv_transfer_config"]["kv_role"] for side in SIDES]
    assert roles == ["kv_producer", "kv_consumer"]
    assert shared == {"kv_transfer_config": {"kv_connector_extra_config": {}}}
