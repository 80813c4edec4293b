"""An agent that others reach has keys, unless its config says that it needs none."""

from pathlib import Path
from typing import Any

import pytest

from kvbus.agent import Access
from kvbus.errors import ConfigError
from kvbus_prefill.config import PrefillConfig
from tests.agents import Agents, agents_ended
from tests.keyring import KeyRing

LOOPBACK, WILDCARD = "tcp://127.0.0.1:0", "tcp://0.0.0.0:0"


def config(**changes: Any) -> PrefillConfig:
    binds = {"agent_id": "p", "peer_bind": LOOPBACK, "events_bind": LOOPBACK}
    return PrefillConfig(**{**binds, **changes})


@pytest.mark.parametrize("bind", ["peer_bind", "events_bind"])
def test_a_bind_that_others_reach_wants_keys_or_a_word(bind, tmp_path: Path) -> None:
    exposed = {bind: WILDCARD, "advertise_host": "host"}

    with pytest.raises(ConfigError, match="insecure = true"):
        Access.open(config(**exposed))

    assert Access.open(config(**exposed, insecure=True)).keys is None
    assert Access.open(config(**exposed, **KeyRing(tmp_path).settings("p"))).keys is not None
    assert Access.open(config()).keys is None


@pytest.mark.parametrize("key", ["key_file", "authorized_keys"])
def test_one_of_the_two_keys_of_the_config_alone_is_refused(key, tmp_path: Path) -> None:
    settings = KeyRing(tmp_path).settings("p")
    missing = settings.keys() - {key}

    with pytest.raises(ConfigError, match=f"key '{missing.pop()}': needed"):
        Access.open(config(**{key: settings[key]}))


def test_an_agent_with_a_key_that_others_can_read_does_not_start(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path)
    with agents_ended(Agents) as agents:
        agent = agents.prepare("prefill", **ring.settings("p"))
        ring.secret_path("p").chmod(0o644)
        agent.launch()

        assert agent.exit_status() == 1
        assert "others can read the secret in it; run 'chmod 0600" in agent.process.log_text()
