"""The figures of a world that came to its end."""

from collections.abc import Iterator

from tests.simulator.world import World

ASKED = {
    "handshakes": "Handshake",
    "claims": "Claimed",
    "renewals": "Renewed",
    "packs": "Pack",
    "digests": "Digest",
    "confirms": "Confirmed",
    "takes": "Taken",
    "releases": "Returned",
    "requests sent again": "retries",
    "requests that timed out": "timeouts",
    "busy answers": "busy",
    "messages": "messages",
    "messages lost": "lost",
}


def lines(world: World) -> Iterator[str]:
    """How many of what, over all and for each handoff."""
    counts, took_s = world.counts, sorted(world.took_s)
    num = counts["handoffs"]
    yield f"{num} handoffs in {world.clock.now:.0f} s of the world, {world.clock.num_steps} steps"
    yield f"{'for each handoff':28}"
    for name, counted in ASKED.items():
        yield f"  {name:26}{counts[counted] / num:8.4f}"
    for share in (0.5, 0.99, 0.999):
        if took_s:
            took_ms = 1e3 * took_s[int(share * (len(took_s) - 1))]
            yield f"  completed after, p{100 * share:<8g} {took_ms:14.1f} ms"
    yield "how they ended, and what happened"
    told = {*ASKED.values(), "handoffs", "CheckMemory", "Unpack", "Withdrawn"}
    for name in sorted(counts.keys() - told):
        yield f"  {name:44}{counts[name]:10}"
