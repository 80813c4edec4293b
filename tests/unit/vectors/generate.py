"""Brings the golden vectors up to date: ``python -m tests.unit.vectors.generate``.

The messages are in the files: a new one is written there, without its frame. A field that is new in
a message gets its default, and every frame is made again: what is different says how the wire is.
"""

from collections.abc import Iterator
from typing import Any

from kvbus.protocol import from_body, prompt_digest, to_body
from tests.unit.vectors.golden import FOLDER, KINDS, body_in, frame_of, read, rooms, written
from tests.unit.vectors.refused_examples import refused

PROMPTS: list[tuple[list[int], list[str]]] = [
    ([], [""]),
    ([1], [""]),
    ([151644, 872, 198, 9707, 0], [""]),
    ([151644, 872, 198, 9707, 0], ["a-lora"]),
    ([7, 128256, 128256, 9], ["", "image-1", "Bild-ü"]),
]


def files() -> Iterator[tuple[str, str]]:
    """Every file of vectors by its name, and its text."""
    for room in rooms():
        vectors = read(room)
        for vector in vectors:
            message = vector["message"]
            body = to_body(from_body(KINDS[vector["name"]], body_in(message)))
            key = next(key for key in ("body", "ok", "error") if key in message)
            vector["message"] = {**message, key: body}
            vector["frame"] = frame_of(vector).hex()
        yield f"{room}.json", written(vectors)
    yield "refused.json", written([one.vector() for one in refused()])
    yield "prompts.json", written([_prompt(*one) for one in PROMPTS])


def _prompt(token_ids: list[int], conditions: list[str]) -> dict[str, Any]:
    digest = prompt_digest(token_ids, conditions)
    return {"token_ids": token_ids, "conditions": conditions, "prompt_digest": digest}


if __name__ == "__main__":
    for name, text in files():
        (FOLDER / name).write_text(text)
