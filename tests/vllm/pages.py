"""The KV that a server has in memory, page by page: what one layer keeps of one block.

Refuses to know layouts: a page is so many bytes, and equal or not.
"""

import hashlib
import re
from pathlib import Path

from tests.vllm.servers import VllmServer

SHARED_BY_TORCH = re.compile("^([0-9a-f]+)-([0-9a-f]+) rw-s .* /dev/shm/torch_", re.MULTILINE)


def filled_pages(server: VllmServer, token_bytes: int) -> set[bytes]:
    """Digests of the pages of a server of one worker that are filled to the last token but one.

    ``token_bytes`` is what one layer keeps of a token. The last token is not looked at: that of a
    prompt is computed by the decode side, too.
    """
    page_bytes = server.block_size() * token_bytes
    (worker,) = server.pids("VLLM::Worker")
    maps = SHARED_BY_TORCH.findall(Path(f"/proc/{worker}/maps").read_text())
    assert maps, "the worker shares no tensor"
    found: set[bytes] = set()
    with Path(f"/proc/{worker}/mem").open("rb", buffering=0) as memory:
        for start, end in ((int(start, 16), int(end, 16)) for start, end in maps):
            memory.seek(start)
            for _ in range((end - start) // page_bytes):
                page = memory.read(page_bytes)[:-token_bytes]
                if any(page[-token_bytes:]):
                    found.add(_digest(page))
    return found


def _digest(page: bytes) -> bytes:
    return hashlib.blake2b(page, digest_size=16).digest()
