"""``kvbus status`` tells what happened to a fetch and to an offer, a line for each event."""

import anyio
import pytest
from typer.testing import CliRunner

from kvbus.cli import app
from tests.engines import pair

pytestmark = pytest.mark.anyio


async def told(*arguments: str) -> list[str]:
    """The command runs an event loop of its own."""
    result = await anyio.to_thread.run_sync(CliRunner().invoke, app, ["status", *arguments])
    assert result.exit_code == 0, result.stderr
    return result.stdout.splitlines()


async def test_the_story_of_a_handoff_is_told_on_both_sides(prefill, decode):
    async with pair(prefill.attach, decode.attach) as (source, target):
        offer = await source.prefill.offer("r", num_tokens=16, block_ids={"full": [1]})
        fetch = target.decode.fetch(offer.ticket, num_tokens=16, block_ids={"full": [2]})
        await fetch.completed()
        await offer.released()

    of_fetch = await told(decode.peer, "--fetch", fetch.fetch_id)
    of_offer = await told(prefill.peer, "--offer", offer.offer_id)

    steps = [line.partition(" s  ")[2] for line in of_fetch if " s  " in line]
    assert "LeaseGranted -> reading: ReadChunk" in steps
    assert "leg 0 LegDue -> reading: PostRead" in steps
    assert "leg 0 ReadEnded -> over: -" in steps
    assert "LeaseConfirmed -> completed: ReportFetched" in steps
    offered = [line.partition(" s  ")[2] for line in of_offer if " s  " in line]
    assert offered[0].startswith("Opened -> sealed")
    assert offered[-1].startswith("Confirmed -> released")


async def test_what_an_agent_does_not_know_has_no_story(decode):
    lines = await told(decode.peer, "--fetch", "never")

    assert lines[-1] == "no such entry"
