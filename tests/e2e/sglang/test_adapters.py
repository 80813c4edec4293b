"""LoRA adapters of equal names, in folders of each server's own."""

import json
from pathlib import Path

import pytest

from tests.e2e.sglang.clusters import NUM_TOKENS, Shape, Side, cluster, prompt_of
from tests.e2e.sglang.servers import RefusedError, SglangServer

pytestmark = pytest.mark.long
NAMES = ("sql", "chat")
LENGTHS = (16, 17, 300)
RANK, SIZE, NUM_LAYERS = 8, 512, 4
UNPINNED = {"NO_PINS_ON_CPUS": "1"}


def adapters(folder: Path) -> tuple[str, ...]:
    """Write adapters of random weights; the options that load them."""
    import torch
    from safetensors.torch import save_file

    for seed, name in enumerate(NAMES):
        draw = torch.Generator().manual_seed(seed)
        weights = {}
        for layer in range(NUM_LAYERS):
            part = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
            weights[f"{part}.lora_A.weight"] = 0.05 * torch.randn(RANK, SIZE, generator=draw)
            weights[f"{part}.lora_B.weight"] = 0.05 * torch.randn(SIZE, RANK, generator=draw)
        (folder / name).mkdir(parents=True)
        save_file(weights, folder / name / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 64, "target_modules": ["o_proj"]}
        (folder / name / "adapter_config.json").write_text(json.dumps(config))
    paths = (f"{name}={folder / name}" for name in NAMES)
    return ("--lora-backend", "torch_native", "--lora-paths", *paths)


@pytest.mark.kind("LoRA adapters, by name", on="servers")
def test_decode_says_what_sglang_says_alone_with_each_adapter(models: Path, tmp_path: Path) -> None:
    ours, theirs, its = (adapters(tmp_path / one) for one in ("prefill", "decode", "alone"))
    prefill, decode = Side(16, flags=ours, env=UNPINNED), Side(16, flags=theirs, env=UNPINNED)
    prompts = [prompt_of(length, seed=length) for length in LENGTHS]
    asked = [(name, prompt) for name in (None, *NAMES) for prompt in prompts]
    one = SglangServer(models / "gqa", tmp_path / "one", ("--page-size", "16", *its), UNPINNED)

    with cluster(Shape(prefill, decode), models, tmp_path) as pair:
        pair.wait_started()
        said = []
        for name, prompt in asked * 2:
            calls = pair.begin(prompt, **pair.room(), lora_path=name)
            said.append([call.tokens() for call in calls][1])
        room = pair.room()
        unlike = [
            server.begin(prompt_of(40, seed=7), NUM_TOKENS, **room, lora_path=name)
            for server, name in zip((pair.prefill, pair.decode), NAMES, strict=True)
        ]
        for call in unlike:
            with pytest.raises(RefusedError):
                call.tokens()
        pair.check()

    one.launch()
    try:
        one.wait_started()
        expected = [one.generate(prompt, NUM_TOKENS, lora_path=name) for name, prompt in asked]
    finally:
        one.stop()
    assert said == expected * 2
    assert len({tuple(tokens) for tokens in expected}) == len(expected)
