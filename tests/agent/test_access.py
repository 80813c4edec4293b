"""Whether an agent sees that its own key is missing in the folder of trusted keys."""

import json
from pathlib import Path

import pytest

from kvbus.agent import Access
from kvbus.keys import Role, TrustedKeys
from tests.agents import AgentProcess, Agents, agents_ended
from tests.keyring import KeyRing

pytestmark = pytest.mark.anyio


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    ring = KeyRing(tmp_path)
    ring.trust("decode", Role.DECODE)
    return ring


def access_of(ring: KeyRing, name: str) -> Access:
    trusted = TrustedKeys(ring.trusted)
    trusted.refresh()
    return Access(ring.pair(name), trusted)


def test_a_folder_that_only_says_whom_we_trust_need_not_have_our_key(ring: KeyRing) -> None:
    assert not access_of(ring, "prefill").has_lost(Role.PREFILL)


def test_our_key_is_missing_where_other_keys_of_our_role_are(ring: KeyRing) -> None:
    ring.trust("prefill-1", Role.PREFILL)

    assert access_of(ring, "prefill").has_lost(Role.PREFILL)
    assert not access_of(ring, "prefill-1").has_lost(Role.PREFILL)


async def test_our_key_is_missing_where_it_was_before(ring: KeyRing) -> None:
    ring.trust("prefill", Role.PREFILL)
    access = access_of(ring, "prefill")
    was_lost = access.has_lost(Role.PREFILL)

    ring.revoke("prefill")
    await access.look()

    assert (was_lost, access.has_lost(Role.PREFILL)) == (False, True)


def test_a_prefill_agent_whose_key_was_revoked_says_so(ring: KeyRing) -> None:
    with agents_ended(Agents) as agents:
        prefill = ring.prepare(agents, Role.PREFILL, "prefill")
        agents.start(prefill)
        before = wrong(prefill)

        ring.revoke("prefill")
        prefill.says("keys.changed", num_lost=1)

        assert not [what for what in before if "our own key" in what]
        assert [what for what in wrong(prefill) if "our own key is not among" in what]


def wrong(agent: AgentProcess) -> list[str]:
    return [fault["what"] for fault in json.loads(agent.page("/live")[1])["faults"]]
