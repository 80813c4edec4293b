"""Hand the KV cache of one prompt from a prefill engine to a decode engine.

    kvbus-prefill <(kvbus-prefill --print-config) --set runtime_dir=/tmp/kvbus-prefill &
    kvbus-decode <(kvbus-decode --print-config) --set runtime_dir=/tmp/kvbus-decode &
    python examples/handoff.py /tmp/kvbus-prefill/attach.sock /tmp/kvbus-decode/attach.sock

Both engines run in this process. In production each one runs beside its own agent.
"""

import sys
from typing import Any

import torch

from kvbus.engine import Link, describe_tensors
from kvbus.errors import FetchFailed
from kvbus.geometry import EngineSpec, GroupSpec

FULL = GroupSpec("full", (0, 1), block_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16")
NUM_TOKENS = 40


def attach(socket: str, engine_id: str) -> tuple[Link, torch.Tensor]:
    engine = EngineSpec(engine_id, model="my-model@rev1", tp_size=1, groups=(FULL,))
    cache = torch.zeros(2, 2, 64, 16, 8, 128, dtype=torch.bfloat16)
    memory = describe_tensors({"full": cache}, "layer kv block token head dim", engine=engine)
    return Link(socket, engine, memory=memory, attach_timeout_s=30), cache


def tokens(cache: torch.Tensor, blocks: list[int]) -> torch.Tensor:
    return cache[:, :, blocks].flatten(2, 3)[:, :, :NUM_TOKENS]


def fetch_or_recompute(link: Link, ticket: dict[str, Any], blocks: list[int]) -> bool:
    fetch = link.fetch(ticket, num_tokens=NUM_TOKENS, block_ids={"full": blocks})
    try:
        fetch.ended.wait()  # returns when the KV in the blocks is complete and valid
        return True
    except FetchFailed as error:
        print(f"recompute the prompt: {error}")
        link.release(ticket)
        fetch.freed.wait()  # returns when no agent can write into the blocks
        return False


def main(prefill_socket: str, decode_socket: str) -> None:
    prefill, source = attach(prefill_socket, "prefill-engine-0")
    decode, target = attach(decode_socket, "decode-engine-0")
    with prefill, decode:
        source.normal_()  # stands for the forward pass over the prompt, into blocks 7, 3 and 9
        offer = prefill.offer("request-1", num_tokens=NUM_TOKENS, block_ids={"full": [7, 3, 9]})
        if fetch_or_recompute(decode, offer.ticket, [0, 1, 2]):  # the ticket is a small JSON dict
            sent, received = tokens(source, [7, 3, 9]), tokens(target, [0, 1, 2])
            print(f"{NUM_TOKENS} tokens handed off, equal: {torch.equal(sent, received)}")
        offer.ended.wait()  # now the prefill engine may reuse blocks 7, 3 and 9


if __name__ == "__main__":
    main(*sys.argv[1:])
