"""A model whose KV is one latent vector a token: decode has the very bytes of prefill."""

import hashlib
import re
from pathlib import Path

import pytest

from tests.e2e.vllm.clusters import Cluster, prompt_of
from tests.e2e.vllm.models import MLA_TOKEN_BYTES, NUM_LAYERS
from tests.e2e.vllm.servers import VllmServer

CLUSTER = "mla"
NUM_BLOCKS = 3
SHARED_BY_TORCH = re.compile("^([0-9a-f]+)-([0-9a-f]+) rw-s .* /dev/shm/torch_", re.MULTILINE)


def filled_pages(server: VllmServer) -> set[bytes]:
    """Digests of the pages that are filled to the last token but one, of a server of one worker.

    A page is what one layer keeps of a block. The last token is not looked at: that of a prompt is
    computed by the decode side, too.
    """
    page_bytes = server.block_size() * MLA_TOKEN_BYTES
    (worker,) = server.pids("VLLM::Worker")
    maps = SHARED_BY_TORCH.findall(Path(f"/proc/{worker}/maps").read_text())
    assert maps, "the worker shares no tensor"
    found: set[bytes] = set()
    with Path(f"/proc/{worker}/mem").open("rb", buffering=0) as memory:
        for start, end in ((int(start, 16), int(end, 16)) for start, end in maps):
            memory.seek(start)
            for _ in range((end - start) // page_bytes):
                page = memory.read(page_bytes)[:-MLA_TOKEN_BYTES]
                if any(page[-MLA_TOKEN_BYTES:]):
                    found.add(hashlib.blake2b(page, digest_size=16).digest())
    return found


@pytest.mark.kind("MLA", on="servers")
def test_decode_has_the_very_bytes_that_prefill_computed(pair: Cluster) -> None:
    prompt = prompt_of(NUM_BLOCKS * pair.prefill.block_size(), seed=99)
    before = filled_pages(pair.prefill)
    ticket = pair.ticket(prompt)
    computed = filled_pages(pair.prefill) - before
    assert len(computed) == NUM_BLOCKS * NUM_LAYERS
    assert not computed & filled_pages(pair.decode)

    pair.redeem(prompt, ticket)

    assert computed <= filled_pages(pair.decode)


def test_decode_goes_on_as_it_does_alone(pair: Cluster) -> None:
    """As vLLM's MLA on CPUs says other tokens after a prompt than after the same tokens of its own.

    So the last token of the prompt is one that decode would have said itself. Sums of another order
    let the two part later.
    """
    prompt = prompt_of(300, seed=1)
    alone, before = pair.alone(prompt), pair.moved()

    said = pair.handoff([*prompt, alone[0]], cache_salt="loads all")

    assert said[:3] == alone[1:4]
    assert pair.moved() > before
