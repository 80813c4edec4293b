"""The page "Deploy vLLM" as a program: its shell blocks, split into commands, and their rules."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "vllm.md"
HOSTS = {"10.0.0.1": "prefill", "10.0.0.2": "decode"}
WHERE = {
    **{f"on {address}": (name,) for address, name in HOSTS.items()},
    "on both hosts": tuple(HOSTS.values()),
}
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
AS_USER = re.compile(r"^sudo (-H )?-u kvbus ")
NOT_RUN = (
    *("git clone ", "/opt/kvbus/bin/pip install ", "useradd ", "userdel ", "systemctl daemon-"),
    "cd /var/lib/kvbus",
)
"""Commands that need a registry, a remote or a new user, or change services of this machine."""
SHELL = (
    *("python3 -m venv ", "install -d ", "cp /opt/kvbus/src/", "tee /etc/kvbus/"),
    *("/opt/kvbus/bin/kvbus ", "curl ", "journalctl ", "rm -r /etc/"),
)
STARTS_AGENT, STOPS_AGENT = ("systemctl enable --now ",), ("systemctl disable --now ",)
SERVES, ROUTES = ("/opt/kvbus/bin/vllm serve ",), ("/opt/kvbus/bin/vllm-router ",)
RULES = (*NOT_RUN, *SHELL, *STARTS_AGENT, *STOPS_AGENT, *SERVES, *ROUTES)


@dataclass(frozen=True)
class Command:
    """One command of the page, without `sudo`, on one host."""

    host: str
    text: str

    def begins(self, beginnings: tuple[str, ...]) -> bool:
        return self.text.startswith(beginnings)


def commands() -> Iterator[Command]:
    """Yield the commands of all shell blocks, in order."""
    for kind, text in fenced("bash"):
        title, _, script = text.partition("\n")
        where = title.removeprefix("# ")
        assert where in WHERE, f"a block of {kind} begins with {title!r}"
        for host in WHERE[where]:
            yield from (Command(host, AS_USER.sub("", one)) for one in split(script))


def fenced(kind: str) -> list[tuple[str, str]]:
    return [(one, text) for one, text in FENCED.findall(PAGE.read_text("utf-8")) if one == kind]


def kinds_of_code() -> set[str]:
    """Return the languages of fenced blocks; indented code counts as one."""
    page = PAGE.read_text("utf-8")
    rest = FENCED.sub("", page)
    indented = {"indented"} if re.search(r"^ {4}\S", rest, re.MULTILINE) else set()
    return {kind for kind, _ in FENCED.findall(page)} | indented


def split(script: str) -> Iterator[str]:
    """Yield the commands of a script, some of several lines."""
    text = ""
    for line in script.splitlines(keepends=True):
        text += line
        if _is_whole(text):
            yield text.strip()
            text = ""
    assert not text, f"not a whole command: {text}"


def _is_whole(text: str) -> bool:
    """Bash also warns about a here-document without an end."""
    if text.endswith("\\\n"):
        return False
    checked = subprocess.run(["/bin/bash", "-n", "-c", text], capture_output=True, check=False)
    return checked.returncode == 0 and not checked.stderr


def words(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", " "))
