"""Key files: what is refused, with what to do about it, and never with the secret key."""

import resource
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from kvbus.bus import new_key_pair
from kvbus.errors import ConfigError
from kvbus.keys.files import read_secret, write_secret
from kvbus.keys.trusted import TrustedKey, TrustedKeys, revoke_trusted, write_trusted
from kvbus.protocol import Role

PAIR, OTHER = new_key_pair(), new_key_pair()
DECODE, NOBODY = frozenset((Role.DECODE,)), frozenset[Role]()
LOST = frozenset({PAIR.public})


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "agent.key"
    write_secret(path, PAIR)
    return path


@pytest.fixture
def trusted(tmp_path: Path) -> TrustedKeys:
    write_trusted(tmp_path / "trusted", TrustedKey("decode-0", PAIR.public, DECODE))
    return TrustedKeys(tmp_path / "trusted")


def test_a_secret_file_is_for_its_owner_alone_and_reads_back(secret: Path) -> None:
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read_secret(secret) == PAIR
    assert PAIR.secret not in repr(PAIR)
    with pytest.raises(ConfigError, match="is there already"):
        write_secret(secret, PAIR)


RIGHT = f'secret_key = "{PAIR.secret}"\n'
WRONG: dict[str, tuple[str, int, str]] = {
    "nothing": ("", 0o600, "has no secret_key"),
    "no toml": ("no toml", 0o600, "not TOML"),
    "short": ('secret_key = "short"', 0o600, "5 characters in place of 40"),
    "alphabet": (f'secret_key = "{"~" * 40}"', 0o600, "not of Z85"),
    "another pair": (f'public_key = "x"\n{RIGHT}', 0o600, "not that of secret_key"),
    "large": ("#" * 5000, 0o600, "larger than 4096 bytes"),
    "read by a group": (RIGHT, 0o640, "chmod"),
    "read by others": (RIGHT, 0o604, "chmod"),
    "written by a group": (RIGHT, 0o660, "chmod"),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_wrong_key_file_is_refused_by_name_without_its_secret(secret: Path, why: str) -> None:
    text, mode, message = WRONG[why]
    secret.write_text(text)
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=message) as refused:
        read_secret(secret)
    assert str(secret) in refused.value.message
    assert PAIR.secret not in refused.value.message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", ""),
        ("# router  router  KEY", ""),
        ("wrong", ":2: not NAME ROLE"),
        ("wrong  decode  short", ":2: not a key"),
        (f"wrong  king  {OTHER.public}", ":2: there is no role 'king'"),
        (f"wrong  decode,  {OTHER.public}", ":2: there is no role ''"),
        (f"wrong  decode  router  {OTHER.public}", ":2: not NAME ROLE"),
        ("wr\0ng  decode  \ufffd", ":2: not a key"),
    ],
    ids=["empty", "comment", "word", "key", "role", "half", "spaces", "no text"],
)
def test_wrong_line_leaves_trust_of_others(trusted: TrustedKeys, line: str, problem: str) -> None:
    with trusted.path.open("a") as file:
        file.write(line)
    write_trusted(trusted.path, TrustedKey("right", OTHER.public, DECODE))
    assert trusted.refresh() == frozenset()
    assert trusted.roles_of(OTHER.public) == trusted.roles_of(PAIR.public) == DECODE
    assert problem in " ".join(trusted.problems)
    assert len(trusted.problems) == bool(problem)


def test_a_file_that_others_could_change_is_not_trusted(trusted: TrustedKeys) -> None:
    trusted.path.chmod(0o666)
    trusted.refresh()
    assert trusted.roles_of(PAIR.public) == NOBODY
    assert f"chmod go-w {trusted.path}" in trusted.problems[0]


def test_missing_file_trusts_no_key_until_it_comes_back(trusted: TrustedKeys) -> None:
    away = trusted.path.with_name("away")
    trusted.path.rename(away)
    assert (trusted.refresh(), trusted.roles_of(PAIR.public)) == (LOST, NOBODY)
    assert "nobody is trusted" in trusted.problems[0]
    assert trusted.refresh() is None
    away.rename(trusted.path)
    assert (trusted.refresh(), trusted.roles_of(PAIR.public)) == (frozenset(), DECODE)
    assert trusted.problems == ()


@contextmanager
def limited(limit: int, value: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


def contents(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("name", ["other.key", "trusted"])
def test_write_on_full_disk_changes_nothing(trusted: TrustedKeys, name: str) -> None:
    path, one = trusted.path.with_name(name), TrustedKey("decode-1", OTHER.public, DECODE)
    write = (
        partial(write_trusted, path, one)
        if name == "trusted"
        else partial(write_secret, path, OTHER)
    )
    before = contents(path.parent)
    with limited(resource.RLIMIT_FSIZE, 8), pytest.raises(ConfigError, match="cannot write"):
        write()
    assert contents(path.parent) == before
    write()
    assert OTHER.public in path.read_text()


KILLED = """
import os, sys
from pathlib import Path
from kvbus.keys.trusted import TrustedKey, revoke_trusted, write_trusted
from kvbus.protocol import Role
os.fsync = lambda _: os._exit(9)  # when all is written, and nothing is replaced
path, key = Path(sys.argv[1]), sys.argv[2]
if key == "decode-0":
    revoke_trusted(path, key)
else:
    write_trusted(path, TrustedKey("decode-1", key, frozenset((Role.DECODE,))))
"""


@pytest.mark.parametrize("key", ["decode-0", OTHER.public], ids=["revoke", "trust"])
def test_a_writer_that_is_killed_changes_nothing(trusted: TrustedKeys, key: str) -> None:
    before = trusted.path.read_text()
    killed = subprocess.run([sys.executable, "-c", KILLED, trusted.path, key], check=False)
    after = trusted.path.read_text()
    write_trusted(trusted.path, TrustedKey("decode-2", OTHER.public, DECODE))
    revoked = revoke_trusted(trusted.path, "decode-0")
    assert (killed.returncode, after) == (9, before)
    assert [one.name for one in revoked] == ["decode-0"]
    assert trusted.path.read_text().split()[0] == "decode-2"


def test_writers_at_the_same_time_lose_no_key(trusted: TrustedKeys) -> None:
    names = [f"decode-{number}" for number in range(1, 41)]

    def trust(name: str) -> None:
        write_trusted(trusted.path, TrustedKey(name, OTHER.public, DECODE))
        if int(name.partition("-")[2]) % 2:
            revoke_trusted(trusted.path, name)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(trust, names))
    trusted.refresh()
    assert {one.name for one in trusted} == {"decode-0", *names[1::2]}


def test_a_process_without_descriptors_trusts_whom_it_trusted(trusted: TrustedKeys) -> None:
    trusted.path.touch()
    with limited(resource.RLIMIT_NOFILE, 0):
        lost = trusted.refresh()
    assert lost is None
    assert trusted.roles_of(PAIR.public) == DECODE


def test_a_key_in_two_lines_has_the_roles_of_both_until_one_goes(trusted: TrustedKeys) -> None:
    write_trusted(trusted.path, TrustedKey("again", PAIR.public, frozenset((Role.ROUTER,))))
    assert trusted.refresh() == frozenset()
    assert trusted.roles_of(PAIR.public) == {Role.DECODE, Role.ROUTER}
    assert trusted.refresh() is None
    revoke_trusted(trusted.path, "again")
    assert (trusted.refresh(), trusted.roles_of(PAIR.public)) == (LOST, DECODE)


def test_an_edit_in_place_is_seen(trusted: TrustedKeys) -> None:
    with trusted.path.open("r+") as file:
        text = file.read().replace("  decode", "  router")
        file.seek(0)
        file.write(text)
    assert trusted.refresh() == LOST


def test_revoke_keeps_other_lines_and_readers_see_no_half_file(trusted: TrustedKeys) -> None:
    others = f"# ours\n\nwrong\nrouter  router  {OTHER.public}\n"
    with trusted.path.open("a") as file:
        file.write(others)
    before = trusted.path.read_text()
    with trusted.path.open() as opened:
        revoked = revoke_trusted(trusted.path, PAIR.public)
        still_read = opened.read()
    assert [one.name for one in revoked] == ["decode-0"]
    assert (still_read, trusted.path.read_text()) == (before, others)
    assert revoke_trusted(trusted.path, "decode-0") == []


@pytest.mark.parametrize("of_the_file", [True, False])
def test_a_link_that_leads_elsewhere_now_is_seen(tmp_path: Path, of_the_file: bool) -> None:
    """The kubelet replaces a link in the path to a config map."""
    for version, pair in (("..1", PAIR), ("..2", OTHER)):
        write_trusted(tmp_path / version / "trusted", TrustedKey("d", pair.public, DECODE))
    target = "{}/trusted" if of_the_file else "{}"
    link = tmp_path / "..data"
    link.symlink_to(target.format("..1"))
    keys = TrustedKeys(link if of_the_file else link / "trusted")
    before = keys.roles_of(PAIR.public)
    (tmp_path / "..data_tmp").symlink_to(target.format("..2"))
    (tmp_path / "..data_tmp").rename(link)
    assert before == DECODE
    assert keys.refresh() == LOST
