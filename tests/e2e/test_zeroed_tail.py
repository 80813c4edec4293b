"""The unused slots of a fetch's last block are zeroed when the engine asks, and only then."""

import pytest
import torch

from tests.agents import until
from tests.engines import pair

pytestmark = pytest.mark.anyio


async def test_a_tail_is_zeroed_though_all_tokens_were_read_before_the_seal(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        theirs, ours = source.views()[0, 0, "k"].clone(), target.views()[0, 0, "k"]
        blocks = {"full": [5, 2]}, {"full": [1, 0]}
        offer = await source.prefill.offer("r", num_tokens=20, block_ids=blocks[0], sealed=False)
        fetch = target.decode.fetch(
            offer.ticket, num_tokens=20, block_ids=blocks[1], zero_tail=True
        )
        await until(lambda: torch.equal(ours[0][:4], theirs[2][:4]))

        await offer.seal()
        await fetch.completed()

        assert torch.equal(ours[1], theirs[5])
        assert torch.equal(ours[0][:4], theirs[2][:4])
        assert not ours[0][4:].any()
