"""Brings the golden vectors up to date: ``python -m tests.vectors.generate``.

The messages are in the files: a new one is written there, without its frame. A field that is new in
a message gets its default, and every frame is made again: what is different says how the wire is.
"""

from collections.abc import Iterator

from kvbus.protocol import from_body, to_body
from tests.vectors.golden import FOLDER, KINDS, body_in, frame_of, read, rooms, written
from tests.vectors.refused_examples import refused


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


if __name__ == "__main__":
    for name, text in files():
        (FOLDER / name).write_text(text)
