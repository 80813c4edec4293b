"""Prompts as JSON lists of random token ids, never the same one twice.

Refuses to repeat: each is drawn from one stream, so a server has no prefix of any.
"""

import json
import random

from .model import FIRST_ORDINARY_TOKEN, VOCABULARY


class Prompts:
    """A stream of prompts; another ``seed`` is another stream."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def draw(self, num_tokens: int) -> str:
        """The next prompt."""
        return json.dumps(
            [self._random.randrange(FIRST_ORDINARY_TOKEN, VOCABULARY) for _ in range(num_tokens)],
            separators=(",", ":"),
        )

    def several(self, num_prompts: int, num_tokens: int) -> list[str]:
        """The next prompts."""
        return [self.draw(num_tokens) for _ in range(num_prompts)]
