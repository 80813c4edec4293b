"""A prefill server with so few blocks that it takes those of a request that decode reads."""

from tests.vllm.clusters import Cluster, prompt_of
from tests.vllm.shapes import CROWDED

SHAPE = CROWDED


def test_decode_says_what_it_says_alone_when_prefill_preempts_what_it_reads(pair: Cluster) -> None:
    before = pair.prefill.metric("num_preemptions_total")
    other, prompt = prompt_of(200, seed=9000), prompt_of(300, seed=9001)
    to_decode, to_prefill = pair.meeting()

    growing = pair.prefill.begin(other, 250, stream=True).stream()
    next(growing)
    decode = pair.begin(prompt, to_decode)
    prefill = pair.prefill.begin(prompt, 150, kv_transfer_params=to_prefill)
    said = decode.completion().tokens
    list(growing)
    prefill.completion()

    assert pair.prefill.metric("num_preemptions_total") > before
    assert said == pair.alone(prompt)
