"""One fetch of a decode engine: how it ended, and when its blocks are the engine's again.

Refuses to end by itself: its session tells it what the agent said, or that nobody will.
"""

from collections.abc import Callable

from kvbus.engine.session import EngineSession, Latch
from kvbus.errors import ErrorCode, FetchFailed, KVBusError
from kvbus.protocol.engine import CancelFetch, Fetched, Outcome

OnFetched = Callable[[Fetched], None]
OnLanded = Callable[[int], None]


class Fetch:
    """One fetch of this engine."""

    def __init__(
        self,
        session: EngineSession,
        fetch_id: str,
        on_landed: OnLanded | None = None,
        *,
        overdue_at: float,
    ) -> None:
        self.fetch_id, self.on_landed, self.overdue_at = fetch_id, on_landed, overdue_at
        self._session = session
        self._ended, self._freed, self.settled = Latch(), Latch(), Latch()
        self._fetched: Fetched | None = None
        self.is_observed = False
        self.give_up: Callable[[], None] | None = None
        """Ends it here; set by the session while the agent is too busy for it and knows nothing."""

    @property
    def notice(self) -> Fetched | None:
        """How the fetch ended, None before that.

        Its stage is ``lost`` when its session ended first, ``silent`` when its agent is stopped.
        """
        return self._fetched

    @property
    def are_blocks_free(self) -> bool:
        """Whether nothing can write into the blocks any more."""
        return self._freed.is_set()

    async def completed(self) -> Fetched:
        """The answer that says success: the KV is in the blocks, and valid.

        Raises `FetchFailed`; its ``blocks_free`` says whether `blocks_freed` has to be awaited
        before the blocks are used again. Stage ``lost`` means that the session ended first.
        """
        await self._ended.wait()
        fetched = self._fetched
        if fetched is None:
            raise KVBusError("the fetch ended without an outcome")
        if fetched.outcome is Outcome.COMPLETED:
            return fetched
        raise FetchFailed(
            fetched.message,
            code=_known_code(fetched.code),
            stage=fetched.stage,
            blocks_free=fetched.blocks_free,
            fetch_id=fetched.fetch_id,
        )

    async def blocks_freed(self) -> None:
        """Return when nothing can write into the blocks any more.

        It returns, too, when the agent is gone. But if other agents have ranks of this engine, or
        the agent only hung up, or the session was closed from here, somebody may still write, and
        nobody will say when that is over: then this raises why the session ended (`PeerLost`,
        `AgentHungUp`, `ClosedError`). Do not use the blocks again; close the engine's other
        sessions and register new memory.
        """
        await self.settled.wait()
        if not self.are_blocks_free:
            raise self._session.lost or KVBusError("nobody says when the blocks are free")

    async def cancel(self, *, release_offer: bool = False) -> None:
        """Give up; `completed` raises with code ``cancelled``, unless it had ended before.

        With ``release_offer`` nobody will fetch this ticket any more: the prefill engine gets its
        blocks back now, and not when the offer expires. Also for a fetch that failed; not for one
        that waits as the agent is busy.
        """
        if self.give_up is not None:
            self.give_up()
            return
        await self._session.request(
            CancelFetch(fetch_id=self.fetch_id, release_offer=release_offer)
        )

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when the fetch has ended; at once when it has by now.

        The session's own callbacks are not told of this fetch any more.
        """
        self.is_observed = True
        self._ended.when_set(call)

    def when_freed(self, call: Callable[[], None]) -> None:
        """Have ``call`` called when nothing can write into the blocks any more; or at once.

        Never called when nobody will say so, see `blocks_freed`.
        """
        self._freed.when_set(call)

    def move(self, session: EngineSession) -> None:
        """Called by ``session``: it asks for the fetch from now on."""
        self._session = session

    def end(self, fetched: Fetched) -> None:
        """Called by the session: the fetch ended."""
        self._fetched = self._fetched or fetched
        if fetched.blocks_free:
            self.settle(blocks_free=True)
        self._ended.set()

    def settle(self, *, blocks_free: bool) -> None:
        """Called by the session: the blocks are the engine's again, or will never be."""
        if blocks_free:
            self._freed.set()
        self.settled.set()


def _known_code(code: str) -> ErrorCode:
    try:
        return ErrorCode(code)
    except ValueError:
        return ErrorCode.INTERNAL
