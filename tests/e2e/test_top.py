"""`kvbus top` at real agents: what they did, what is wrong, and who does not answer."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.spawn import free_port
from tests.agents import Agents, agents_ended, wait_until
from tests.engines import failure_of, pair, works

KVBUS = str(Path(sys.executable).with_name("kvbus"))
NOTHING = {"num_tokens": 0, "block_ids": {"full": []}}


def top(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVBUS, "top", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "COLUMNS": "100", **variables},
    )


def row(shown: str, name: str) -> list[str]:
    """The cells of a row."""
    line = next(line for line in shown.splitlines() if line.strip().startswith(name))
    return re.split(r"\s{2,}", line.strip())[1:]


@pytest.mark.anyio
async def test_each_agent_is_a_column_and_what_is_wrong_stands_below(fresh_pair):
    prefill, decode = fresh_pair
    nobody = f"127.0.0.1:{free_port()}"
    binds = [agent.settings["http_bind"] for agent in fresh_pair]
    async with pair(prefill.attach, decode.attach) as (source, target):
        assert await works(source, target)
        offer = await source.prefill.offer("r", **NOTHING)
        await offer.withdraw()
        failed = target.decode.fetch(offer.ticket, **NOTHING, timeout_s=1)
        failure = await failure_of(failed)
        gone = await source.prefill.offer("s", **NOTHING, ttl_s=0.1)
        await gone.released()
        late = await failure_of(target.decode.fetch(gone.ticket, **NOTHING))

        shown = top(*binds, nobody, "--once", "--every", "0.1")
        told = json.loads(top(*binds, "--json").stdout)

    assert shown.returncode == 0, shown.stderr
    assert row(shown.stdout, "state") == ["serving", "serving"]
    assert row(shown.stdout, "peers") == ["1"]
    assert "confirming" not in shown.stdout, "nothing happened between the two looks"
    assert f"{nobody}: no answer" in shown.stdout
    assert late.code.value in shown.stdout
    assert "offer_ttl_s" in shown.stdout
    assert failure.code.value not in shown.stdout, "nobody wanted that one any more"
    assert [told[f"http://{bind}"]["status"]["role"] for bind in binds] == ["prefill", "decode"]


def test_without_addresses_the_agent_of_the_pod_is_asked_with_its_token(tmp_path):
    token = tmp_path / "token"
    token.write_text(f"{'t' * 32}\n")
    token.chmod(0o600)
    with agents_ended(Agents) as agents:
        agent = agents.prepare("prefill", http_token_file=str(token))
        agents.start(agent)
        _, _, port = agent.settings["http_bind"].rpartition(":")
        pod = {"KVBUS_HTTP_BIND": f"$(POD_IP):{port}", "KVBUS_HTTP_TOKEN_FILE": str(token)}

        shown = top("--json", POD_IP="127.0.0.1", **pod)
        unset = top("--json", **pod)

    told = json.loads(shown.stdout)
    assert list(told) == [f"http://127.0.0.1:{port}"], shown.stderr
    assert "status" in told[f"http://127.0.0.1:{port}"]
    assert (unset.returncode, "POD_IP" in unset.stderr) == (2, True)


def test_where_nobody_answers_the_exit_status_says_so():
    shown = top(f"127.0.0.1:{free_port()}", "--once", "--every", "0.1")

    assert shown.returncode == 1
    assert "http_bind" in shown.stderr


@pytest.mark.parametrize("address", ["nonsense", "http://:1", "ftp://a:1", "a:b", "http://a:1/x"])
def test_an_address_that_is_none_is_a_mistake(address):
    shown = top(address)

    assert shown.returncode == 2
    assert "HOST:PORT" in shown.stderr


def test_a_token_that_cannot_be_read_is_a_mistake(tmp_path):
    shown = top("127.0.0.1:1", "--token-file", str(tmp_path / "none"))

    assert (shown.returncode, "--token-file" in shown.stderr) == (2, True)


def test_ctrl_c_ends_it_with_status_0(decode, tmp_path):
    out = tmp_path / "out"
    with out.open("w") as file:
        process = subprocess.Popen(
            [KVBUS, "top", decode.settings["http_bind"], "--every", "0.1"],
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_until(lambda: "serving" in out.read_text(), "it has shown something")
        process.send_signal(signal.SIGINT)

        assert process.wait(20) == 0
        assert "Traceback" not in out.read_text()
    finally:
        process.kill()
        process.wait()
