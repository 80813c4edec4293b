"""Owns what the demo compares: one generated token with the digest of its logits.

Refuses to import torch at run time, so that the driver starts at once.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Step:
    """One generated token; ``digest`` is the blake2b of the float32 logits that it came from."""

    token: int
    digest: str

    @classmethod
    def greedy(cls, logits: "Tensor") -> "Step":
        """The most likely token; of equals, the lowest."""
        digest = blake2b(logits.numpy().astype("<f4").tobytes(), digest_size=16)
        return cls(token=int(logits.argmax()), digest=digest.hexdigest())
