"""An engine at several agents keeps its links while one of these starts again, and goes on."""

from contextlib import suppress

import anyio
import pytest

from kvbus.errors import KVBusError
from tests.agents import until
from tests.engines import Engine, begin, engine, make_spec, spread_engine
from tests.faults.conftest import Started

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(240)]

HOME, OTHER = 0, 1
GOES_ON_WITHIN_S = 60


async def hand_over(source: Engine, target: Engine) -> None:
    """One handoff completes with the right bytes."""
    handoff = await begin(source, target, timeout_s=10.0)
    try:
        await handoff.completed()
    except KVBusError:
        await handoff.fetch.freed
        await handoff.offer.withdraw()
        await handoff.offer.ended  # the source changes its blocks then
        raise


async def go_on(source: Engine, target: Engine) -> None:
    """A handoff completes soon: the first may find out what has become of an agent."""
    with anyio.fail_after(GOES_ON_WITHIN_S):
        while True:
            with suppress(KVBusError):
                return await hand_over(source, target)


@pytest.mark.parametrize("which", [HOME, OTHER], ids=["home", "other"])
async def test_an_engine_at_several_agents_goes_on_with_one_that_was_killed_and_is_back(
    fresh: Started, which: int
) -> None:
    prefill, *decode = fresh.prefill(), fresh.decode(), fresh.decode()
    fresh.start(prefill, *decode)
    async with (
        engine(prefill.attach, make_spec(tp=2), seed=1) as source,
        spread_engine(decode, seed=2) as target,
    ):
        await hand_over(source, target)

        decode[which].kill()
        decode[which].start()
        await until(lambda: target.links[which].num_opened == 2)
        await go_on(source, target)

        assert target.links[1 - which].num_opened == 1, "the memory at the other stays registered"
        assert target.control.num_opened == (2 if which == HOME else 1)
