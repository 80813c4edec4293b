"""Plays the scenes of a role one after the other, and says which there are."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from kvbus.conform.book import Book, Outcome
from kvbus.conform.rules import BOTH, DECODE, PREFILL
from kvbus.conform.scenes import ends, fetching, notices, offering, requests
from kvbus.conform.stage import START_S, Stage, open_stage
from kvbus.protocol.engine import AgentRole

Scene = Callable[[Stage], None]

_COMMON: Mapping[str, Scene] = {
    "lost_reply": requests.lost_reply,
    "ended_first": requests.ended_first,
    "other_order": requests.other_order,
    "unknown_code": requests.unknown_code,
    "busy": requests.busy,
    "twice": notices.twice,
    "early": notices.early,
    "many": notices.many,
    "silence": ends.silence,
    "hang_up": ends.hang_up,
    "new_agent": ends.new_agent,
    "stop": ends.stop,
}
_OFFERING: Mapping[str, Scene] = {
    "sizes": offering.sizes,
    "grows": offering.grows,
    "blocks": offering.blocks,
}
_FETCHING: Mapping[str, Scene] = {
    "shapes": fetching.shapes,
    "counts": fetching.counts,
    "failed": fetching.failed,
    "blocks": fetching.blocks,
}


def scenes_of(role: AgentRole) -> dict[str, Scene]:
    """The scenes of a role by name, in the order in which they are played."""
    return {**(_OFFERING if role is AgentRole.PREFILL else _FETCHING), **_COMMON}


def play(
    role: AgentRole,
    command: Sequence[str],
    *,
    log: Path,
    patience_s: float = 10.0,
    start_s: float = START_S,
    only: Collection[str] = (),
    on_scene: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """What came of each rule; ``only`` names the scenes that are played, all when it is empty.

    The engine's stderr goes to ``log``. Raises `ConfigError` when the command cannot be started.
    """
    book = Book()
    with open_stage(role, command, book, log=log, patience_s=patience_s, start_s=start_s) as stage:
        for name, scene in scenes_of(role).items():
            if not only or name in only:
                on_scene(name)
                if not _play_scene(stage, scene):
                    break
    own = PREFILL if role is AgentRole.PREFILL else DECODE
    return book.outcomes((*BOTH, *own))


def _play_scene(stage: Stage, scene: Scene) -> bool:
    """Play one; False when the engine does not even register.

    An engine that did something wrong is started anew, so that each scene stands alone.
    """
    if not stage.engine.is_alive:
        stage.engine.stop()
        started = stage.start()
        late = f"not all sessions registered: {stage.engine.last_words()}"
        if not stage.book.expect("register.sessions", started, late):
            return False
    before = stage.book.num_wrong
    scene(stage)
    stage.check_once()
    if stage.book.num_wrong > before:
        stage.engine.stop()
        stage.agent.hang_up()
    return True
