"""Pools that no CPU computes: what decode has after a handoff is what prefill had.

SGLang's own pools, and the blocks that its scheduler names of them; no model runs.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e.sglang.backend import (
    PAGES,
    ROOMS,
    ROW,
    Managers,
    ends,
    pages_of,
    receiver_of,
    sender_of,
)
from tests.e2e.sglang.pooled import (
    drafted,
    head_pool,
    index_pool,
    latent_pool,
    mamba_pool,
    pool_of_windows,
    queue_of,
)

pytestmark = pytest.mark.filterwarnings("default")  # SGLang's imports warn
SLOTS = {"prefill": 3, "decode": 5}
"""Of a request's Mamba state."""
Queues = Callable[[], Any]
KINDS: Mapping[str, tuple[Queues, list[str], list[str]]] = {
    "float8_e4m3fn": (lambda: queue_of(head_pool(torch.float8_e4m3fn)), [], ["full:2"]),
    "float8_e5m2": (lambda: queue_of(head_pool(torch.float8_e5m2)), [], ["full:2"]),
    "float8 latent": (lambda: queue_of(latent_pool(torch.float8_e4m3fn)), [], ["full:2"]),
    "draft of the same shape": (lambda: drafted(head_pool(), head_pool()), [], ["full:4"]),
    "draft of another shape": (
        lambda: drafted(head_pool(), head_pool(num_heads=2, head_dim=8), num_heads=2),
        [],
        ["full:2", "draft:2"],
    ),
    "draft of another dtype": (
        lambda: drafted(head_pool(), head_pool(torch.float8_e5m2)),
        [],
        ["full:2", "draft:2"],
    ),
    "latent draft": (lambda: drafted(latent_pool(), latent_pool()), [], ["full:4"]),
    "index keys": (
        lambda: drafted(index_pool(3, without_index=(1,)), index_pool(1)),
        ["dsa"],
        ["full:4", "index:3", "scale:3"],
    ),
    "windows": (
        lambda: queue_of(pool_of_windows([1], [0, 2], size=64)),
        ["swa"],
        ["full:1", "window:2"],
    ),
    "Mamba": (lambda: queue_of(mamba_pool("Mamba 2")), ["mamba"], ["full:2", "mamba:2"]),
    "gated delta": (lambda: queue_of(mamba_pool("gated delta")), ["mamba"], ["full:2", "mamba:2"]),
    "Kimi": (lambda: queue_of(mamba_pool("Kimi", latent=True)), ["mamba"], ["full:2", "mamba:2"]),
}
"""A queue with its pools, the states that SGLang hands over beside pages, and the groups
with their numbers of layers."""


def state_types(names: list[str]) -> list[Any]:
    from sglang.srt.disaggregation.base.conn import StateType

    return [StateType(name) for name in names]


def blocks_of(role: str, states: list[str]) -> list[Any]:
    """The blocks of each state, as SGLang names them."""
    slot = [np.asarray(SLOTS[role])]
    return [slot if state == "mamba" else pages_of(role) for state in states]


def contents(queue: Any, role: str, states: list[str]) -> dict[Any, torch.Tensor]:
    """The bytes of a request, by layer and part; in pages, of its tokens alone."""
    from kvbus.integrations.sglang.pools import METADATA, pools_of

    found = {}
    for place, tensor in pools_of(queue, state_types(states)).tensors.items():
        if place[0] == METADATA:
            continue
        if tensor.dim() == 3:
            found[place] = tensor[SLOTS[role]].contiguous().view(torch.uint8)
        else:
            tokens = tensor[PAGES[role]].contiguous().view(torch.uint8).flatten(0, 1)
            found[place] = tokens[: 2 * tensor.shape[1] + 3]
    return found


def fill(queue: Any, states: list[str]) -> None:
    """What computed requests leave in all blocks."""
    from kvbus.integrations.sglang.pools import pools_of

    draw = torch.Generator().manual_seed(7)
    for tensor in pools_of(queue, state_types(states)).tensors.values():
        size = [*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size()]
        bytes_ = torch.randint(0, 256, size, dtype=torch.uint8, generator=draw)
        tensor.copy_(bytes_.view(tensor.dtype))


def hand_off(prefill: Any, decode: Any, address: str, states: list[str]) -> list[Any]:
    room = next(ROOMS)
    sender, receiver = sender_of(prefill, room), receiver_of(decode, room, address)
    receiver.send_metadata(pages_of("decode"), ROW, blocks_of("decode", states))
    sender.send(pages_of("prefill")[:2])
    sender.send(pages_of("prefill")[2:], blocks_of("prefill", states))
    return ends(sender, receiver)


@pytest.mark.kind(
    "fp8 (e4m3, e5m2); draft models; index keys of DSA; Mamba 2, gated delta nets, Kimi Linear",
    on="memory",
)
@pytest.mark.parametrize("kind", KINDS)
def test_decode_has_the_bytes_of_prefill(
    managers: Managers, bootstrap: Callable[[], str], kind: str
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    make, states, groups = KINDS[kind]
    ours, theirs = make(), make()
    prefill = managers("prefill", ours, state_types(states))
    decode = managers("decode", theirs, state_types(states))
    fill(ours, states)

    assert hand_off(prefill, decode, bootstrap(), states) == [KVPoll.Success] * 2

    sent, got = contents(ours, "prefill", states), contents(theirs, "decode", states)
    found = [f"{group.name}:{len(group.layers)}" for group in prefill.link.engine.groups]
    assert found == [*groups, "metadata:1"]
    assert sent.keys() == got.keys()
    assert all(torch.equal(sent[place], got[place]) for place in sent)


@pytest.mark.kind("gated delta nets and Kimi Linear of unlike tensor parallelism", on="memory")
@pytest.mark.parametrize("kind", ["gated delta", "Kimi"])
def test_state_of_two_ranks_is_joined_in_one(
    managers: Managers, bootstrap: Callable[[], str], one_rank: dict[str, int], kind: str
) -> None:
    """Each rank has its share of the queries', of the keys' and of the values' channels."""
    from sglang.srt.disaggregation.base.conn import KVPoll

    latent, states = kind == "Kimi", ["mamba"]
    shared = [queue_of(mamba_pool(kind, num_ranks=2, latent=latent)) for _ in range(2)]
    one_rank |= {"attn_tp_size": 2}
    ranks = []
    for number in (1, 0):
        one_rank |= {"attn_tp_rank": number}
        ranks.append(managers("prefill", shared[number], state_types(states), f"two-{kind}"))
    one_rank |= {"attn_tp_size": 1}
    whole = queue_of(mamba_pool(kind, latent=latent))
    decode = managers("decode", whole, state_types(states))
    for number, queue in enumerate(shared):
        mamba = queue.token_to_kv_pool.mamba_pool.mamba_cache
        for at, state in enumerate([*mamba.conv, mamba.temporal]):
            state[:] = torch.arange(state[0, 0].numel()).view(state[0, 0].shape) + 1000 * (
                2 * at + number
            )

    assert hand_off(ranks[1], decode, bootstrap(), states) == [KVPoll.Success] * 2

    slot = SLOTS["decode"]
    caches = [queue.token_to_kv_pool.mamba_pool.mamba_cache for queue in (*shared, whole)]
    temporal = [cache.temporal[:, slot] for cache in caches]
    assert torch.equal(temporal[2], torch.cat(temporal[:2], dim=1))
    axis = whole.token_to_kv_pool.mamba_pool.conv_slice_axis + 1
    blocks = [size // 2 for size in whole.token_to_kv_pool.mamba_pool.conv_shard_groups]
    halves = [cache.conv[0][:, slot].split(blocks, dim=axis) for cache in caches[:2]]
    joined = [one for pair in zip(*halves, strict=True) for one in pair]
    assert torch.equal(caches[2].conv[0][:, slot], torch.cat(joined, dim=axis))


@pytest.mark.parametrize(
    ("prefill_kind", "decode_kind", "field"),
    [
        ("float8_e4m3fn", "float8_e5m2", "full.dtype"),
        ("draft of the same shape", "plain", "full.layers"),
        ("draft of another shape", "plain", "groups"),
    ],
)
def test_unlike_servers_are_refused_by_the_name_of_the_difference(
    managers: Managers,
    bootstrap: Callable[[], str],
    prefill_kind: str,
    decode_kind: str,
    field: str,
) -> None:
    from sglang.srt.disaggregation.base.conn import KVPoll

    kinds = {**KINDS, "plain": (lambda: queue_of(head_pool()), [], [])}
    prefill, decode = (
        managers("prefill", kinds[prefill_kind][0]()),
        managers("decode", kinds[decode_kind][0]()),
    )
    room = next(ROOMS)
    sender, receiver = sender_of(prefill, room), receiver_of(decode, room, bootstrap())

    receiver.send_metadata(pages_of("decode"), ROW, None)
    sender.send(pages_of("prefill"))

    assert ends(receiver) == [KVPoll.Failed]
    assert f"engines differ in {field}" in decode.failure_records[room]
    sender.abort()
    ends(sender)
