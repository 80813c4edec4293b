"""Shells complete the three programs: commands, options, and the values that these know."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

BASH = shutil.which("bash") or "bash"
SHELLS = ("bash", "zsh", "fish")
AGENTS = {"kvbus-prefill": "kvbus_prefill", "kvbus-decode": "kvbus_decode"}
MODULES = {"kvbus": "kvbus", **AGENTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three programs, and a configuration."""
    tmp_path = tmp_path_factory.mktemp("completion")
    for name, module in MODULES.items():
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{sys.executable}\nfrom {module}.__main__ import main\nmain()\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "agent.toml").touch()
    (tmp_path / "notes.txt").touch()
    return tmp_path


def run(folder: Path, *command: str, **env: str) -> str:
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    ended = subprocess.run(
        command,
        env={**os.environ, "PATH": path, **env},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


def completed(folder: Path, script: str, line: str) -> list[str]:
    """What bash offers at the end of the line, by the function that the script has registered."""
    code = f"""
    compopt() {{ :; }}  # it works at a prompt only
    {script}
    line=$1
    COMP_WORDS=($line) COMP_LINE=$line
    [[ $line == *' ' ]] && COMP_WORDS+=('')
    COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
    name=${{COMP_WORDS[0]}}
    function=$(complete -p "$name") function=${{function#*-F }} function=${{function%% *}}
    "$function" "$name" "${{COMP_WORDS[COMP_CWORD]}}"
    printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    return run(folder, BASH, "--norc", "-c", code, "bash", line).split()


@pytest.fixture(scope="module")
def script(folder: Path) -> str:
    return run(folder, "kvbus", _KVBUS_COMPLETE="source_bash")


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("kvbus ben", ["bench", "bench-prefill", "bench-decode"]),
        ("kvbus demo --pa", ["--path"]),
        ("kvbus demo --path ", ["direct", "staged", "packed", "mapped"]),
        ("kvbus bench --only scattered-", ["scattered-256k", "scattered-16k"]),
        ("kvbus keys trust file key --role d", ["decode"]),
        ("kvbus doctor --only n", ["nixl"]),
        ("kvbus conform --role decode --scene ne", ["new_agent"]),
        ("kvbus status --only fetch.f", ["fetch.failed"]),
    ],
)
def test_bash_completes_commands_options_and_values(
    folder: Path, script: str, line: str, wanted: list[str]
) -> None:
    assert completed(folder, script, line) == wanted


@pytest.mark.parametrize("agent", AGENTS)
def test_bash_completes_options_keys_and_configurations_of_agents(folder: Path, agent: str) -> None:
    script = run(folder, agent, "--show-completion", "bash")

    assert completed(folder, script, f"{agent} --s") == ["--set", "--show-completion"]
    assert "copy_threads=" in completed(folder, script, f"{agent} --set copy_")
    assert completed(folder, script, f"{agent} --show-completion ") == list(SHELLS)
    assert completed(folder, script, f"{agent} ") == ["bin", "agent.toml"]


def test_scripts_of_agents_have_every_option(folder: Path) -> None:
    agent = "kvbus-decode"
    options = {word.strip("[],") for word in run(folder, agent, "--help").split()}
    options = {word.removeprefix("--") for word in options if word.startswith("--")}

    assert {"set", "help"} < options
    for shell in SHELLS:
        script = run(folder, agent, "--show-completion", shell)
        assert [name for name in options if name not in script] == []
