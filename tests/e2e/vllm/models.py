"""Small models with random weights, written once a test session for vLLM or SGLang to load.

Refuses to be imported for them: `written` runs this file in a process of its own, as the libraries
that write models take seconds to import and warn of each other.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

VOCABULARY = 512
LONGEST = 4096
WINDOW = 96
NUM_LAYERS = 4
LATENT, ROTATED = 512, 64
MLA_TOKEN_BYTES = (LATENT + ROTATED) * 4
"""What one layer keeps of a token, in float32."""
SPREAD = 0.08  # of the weights: with less, a model says the same whatever it has read
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "max_position_embeddings": LONGEST,
    "initializer_range": SPREAD,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 4, "head_dim": 64}
WRITTEN_WITHIN_S = 300.0


def gqa() -> Any:
    """A Llama whose four KV heads are shared by two query heads each."""
    from transformers import LlamaConfig

    return LlamaConfig(**COMMON, **GROUPED)


def hybrid() -> Any:
    """A Gemma with layers that see a window and layers that see all: two groups of KV."""
    from transformers import Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    return Gemma3TextConfig(
        **COMMON, **GROUPED, sliding_window=WINDOW, layer_types=kinds, query_pre_attn_scalar=4
    )


def mla() -> Any:
    """A DeepSeek whose KV is one latent vector a token."""
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        **COMMON,
        num_key_value_heads=8,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=ROTATED,
        v_head_dim=64,
        first_k_dense_replace=NUM_LAYERS,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_shared_experts=1,
        moe_intermediate_size=64,
    )


def drafted() -> Any:
    """`gqa` with one layer that computes, so that a head of one layer guesses its tokens."""
    return gqa()


def spelled() -> Any:
    """`gqa`, whose tokens are characters too, so that it can say JSON."""
    return gqa()


def mellum() -> Any:
    """Layers of both kinds, for SGLang: a Gemma's windows have no pool of their own there."""
    from transformers import MellumConfig

    kinds = ["sliding_attention", "full_attention"] * 2
    dense = ["dense"] * NUM_LAYERS
    return MellumConfig(
        **COMMON, **GROUPED, sliding_window=WINDOW, layer_types=kinds, mlp_layer_types=dense
    )


def mamba() -> Any:
    """A Falcon-H1: Mamba 2 beside attention in each layer, with one group for all heads."""
    from transformers import FalconH1Config

    return FalconH1Config(
        **COMMON,
        **GROUPED,
        mamba_n_heads=16,
        mamba_d_head=64,
        mamba_d_ssm=1024,
        mamba_n_groups=1,
        mamba_d_state=32,
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "gqa": gqa,
    "hybrid": hybrid,
    "mla": mla,
    "drafted": drafted,
    "mamba": mamba,
    "spelled": spelled,
    "mellum": mellum,
}
FOR_VLLM = ("gqa", "hybrid", "mla", "drafted", "mamba", "spelled")
FOR_SGLANG = ("gqa", "mellum")
EAGLE = "eagle"
"""Folder of the head of `drafted`."""
ADAPTERS = ("one", "two", "new")
"""Folders of LoRA adapters of `spelled`."""


def tokenizer(name: str) -> Any:
    """Words "t3" to "t511" are the tokens of these numbers; of a chat the contents count alone.

    In `spelled`, the printable characters take the place of the first ones.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    words = {f"t{number}": number for number in range(3, VOCABULARY)}
    if name == "spelled":
        words = {chr(29 + n) if n < 98 else word: n for word, n in words.items()}
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    words |= {word: number for number, word in enumerate(special.values())}
    splits = Tokenizer(WordLevel(words, unk_token="<unk>"))
    splits.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=splits, chat_template=template, **special)


def written(folder: Path, names: Sequence[str] = FOR_VLLM) -> Path:
    """Write models into ``folder``, each in a folder with its name in `CONFIGS`."""
    command = [sys.executable, str(Path(__file__)), str(folder), *names]
    subprocess.run(command, check=True, timeout=WRITTEN_WITHIN_S)
    return folder


def write(name: str, folder: Path) -> None:
    """Write one model; the same name gives the same weights."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    if name == "drafted":
        write_head(model, folder / EAGLE)
    if name == "spelled":
        for each in ADAPTERS:
            write_adapter(model, folder / each)
    model.save_pretrained(folder / name)
    tokenizer(name).save_pretrained(folder / name)


def write_head(model: Any, folder: Path) -> None:
    """Write an EAGLE head that guesses what ``model`` says; changes ``model`` to allow that.

    The model computes in its first layer alone, from embeddings that its norm leaves as they are.
    The head has that layer, and takes the embedding of the next token in place of hidden states.
    """
    import torch
    from safetensors.torch import save_file

    inner, size = model.model, model.config.hidden_size
    with torch.no_grad():
        embeddings = inner.embed_tokens.weight
        embeddings /= embeddings.pow(2).mean(dim=1, keepdim=True).sqrt()
        for layer in inner.layers[1:]:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    weights = {
        f"layers.0.{name}": weight.contiguous()
        for name, weight in inner.layers[0].state_dict().items()
        if name != "input_layernorm.weight"
    }
    weights["fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1)
    config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_adapter(model: Any, folder: Path) -> None:
    """Write a LoRA adapter of random weights, after which ``model`` says other tokens."""
    import torch
    from safetensors.torch import save_file

    rank, weights, names = 8, {}, ("q_proj", "k_proj", "v_proj")
    for place, layer in model.named_modules():
        if place.endswith(names):
            num_out, num_in = layer.weight.shape
            name = f"base_model.model.{place}"
            weights[f"{name}.lora_A.weight"] = SPREAD * torch.randn(rank, num_in)
            weights[f"{name}.lora_B.weight"] = SPREAD * torch.randn(num_out, rank)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4 * rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    for each in sys.argv[2:]:
        write(each, Path(sys.argv[1]))
