"""Whether an agent lives, and whether it can take work: what kubelets and balancers ask.

Not alive is what only a restart mends. Not ready mends itself, or is somebody else's to mend.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvbus.agent.http.answer import Answer, as_text
from kvbus.agent.http.loop_asker import ANSWERS_WITHIN_S, LoopAsker
from kvbus.errors import KVBusError
from kvbus.protocol.live import Fault

UNAVAILABLE = "503 Service Unavailable"


class Health:
    """``ping`` asks the transport's thread; ``unready`` names reasons, and runs in the loop."""

    def __init__(
        self, loop: LoopAsker, ping: Callable[[], Future[None]], unready: Callable[[], list[Fault]]
    ) -> None:
        self._loop, self._ping, self._unready = loop, ping, unready

    def healthz(self) -> Answer:
        """503 with the reasons when a thread that moves KV or messages does not answer."""
        pong, until = self._ping(), time.monotonic() + ANSWERS_WITHIN_S  # both have the same time
        loop_problem = self._loop_problem()
        problems = loop_problem, _transport_problem(pong, max(0.0, until - time.monotonic()))
        return _verdict([text for text in problems if text])

    def readyz(self) -> Answer:
        """503 with the reasons when the agent would refuse work, or could not do it."""
        try:
            return _verdict([fault.what for fault in self._loop.ask(self._unready)])
        except KVBusError as error:
            return _verdict([error.message])

    def _loop_problem(self) -> str:
        try:
            self._loop.ask(lambda: None)
        except KVBusError as error:
            return error.message
        return ""


def _transport_problem(pong: Future[None], within_s: float) -> str:
    try:
        pong.result(within_s)
    except TimeoutError:
        return f"the transport's thread has not answered within {ANSWERS_WITHIN_S:g} s"
    except KVBusError as error:
        return error.message
    return ""


def _verdict(problems: Sequence[str]) -> Answer:
    return as_text("\n".join(problems), UNAVAILABLE) if problems else as_text("ok")
