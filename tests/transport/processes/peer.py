"""A process with a transport of its own: obeys JSON lines on stdin, answers on stdout.

Its memory holds the bytes of a seeded generator, so that the other side can tell what is right.
"""

import json
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvbus.transport import Registration, Transport


def main() -> None:
    transport = Transport(sys.argv[1])
    transport.start().result(20)
    transport.hold_progress()
    memory: list[tuple[npt.NDArray[np.uint8], Registration]] = []

    def allocate(size_bytes: int, seed: int) -> dict[str, object]:
        held = np.random.default_rng(seed).integers(0, 256, size_bytes, np.uint8)
        registration = transport.register(held.ctypes.data, size_bytes).result(20)
        memory.append((held, registration))
        blob = transport.metadata([registration]).result(20)
        return {"address": registration.address, "metadata": blob.hex()}

    def refill(index: int, seed: int) -> dict[str, object]:
        held, registration = memory[index]
        transport.deregister(registration).result(20)
        held[:] = np.random.default_rng(seed).integers(0, 256, len(held), np.uint8)
        again = transport.register(held.ctypes.data, len(held)).result(20)
        memory[index] = (held, again)
        return {"metadata": transport.metadata([again]).result(20).hex()}

    def everything() -> dict[str, object]:
        return {"metadata": transport.metadata().result(20).hex()}

    ops: dict[str, Callable[..., dict[str, object]]] = {
        "allocate": allocate,
        "refill": refill,
        "everything": everything,
    }
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(ops[request.pop("op")](**request)), flush=True)


if __name__ == "__main__":
    main()
