"""An agent reports that the file of trusted keys lacks its own key."""

import json
import time
from pathlib import Path

from kvbus.agent.status import LIVE_S
from kvbus.protocol import Role
from tests.support.agents import AgentProcess, Agents, agents_ended
from tests.support.keyring import KeyRing


def misses_its_key(agent: AgentProcess) -> bool:
    time.sleep(LIVE_S)  # else it may be served what was so before
    faults = json.loads(agent.page("/live")[1])["status"]["faults"]
    return any("our own key is not among" in fault["what"] for fault in faults)


def test_prefill_agent_reports_its_own_key_left_out_or_revoked(tmp_path: Path) -> None:
    ring, seen = KeyRing(tmp_path), list[bool]()
    ring.trust("decode", Role.DECODE)
    ring.pair("prefill")  # it is trusted by nobody
    with agents_ended(Agents) as agents:
        prefill = ring.prepare(agents, Role.PREFILL, "prefill")
        agents.start(prefill)
        seen.append(misses_its_key(prefill))
        for change, num_lost in (
            (lambda: ring.trust("prefill-1", Role.PREFILL), 0),
            (lambda: ring.trust("prefill", Role.PREFILL), 0),
            (lambda: ring.revoke("prefill-1"), 1),
            (lambda: ring.revoke("prefill"), 1),
        ):
            prefill.skip_log()
            change()
            prefill.says("keys.changed", num_lost=num_lost)
            seen.append(misses_its_key(prefill))
    assert seen == [False, True, False, False, True]
