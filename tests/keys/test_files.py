"""Key files: what is refused, with what to do about it, and never with the secret key."""

import os
import resource
from pathlib import Path

import pytest

from kvbus.bus import new_key_pair
from kvbus.errors import ConfigError
from kvbus.keys import Role, TrustedKey, TrustedKeys, read_secret, write_secret, write_trusted

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
    return read(tmp_path / "trusted")


def read(folder: Path) -> TrustedKeys:
    keys = TrustedKeys(folder)
    keys.refresh()
    return keys


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


KEY = f'public_key = "{PAIR.public}"\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "public_key: not a key"),
        (KEY, "roles is not a list"),
        (f'{KEY}roles = ["king"]', "there is no role 'king'"),
        (f"{KEY}roles = [7]", "there is no role 7"),
        (f'{KEY}role = "decode"', "'role' is not known"),
        (None, ""),
    ],
    ids=["key", "roles", "role", "number", "name", "a file that goes"],
)
def test_a_file_that_trusts_nobody_leaves_the_trust_of_others(
    trusted: TrustedKeys, text: str | None, problem: str
) -> None:
    wrong = trusted.folder / "wrong.toml"
    wrong.symlink_to(trusted.folder / "nothing") if text is None else wrong.write_text(text)
    write_trusted(trusted.folder, TrustedKey("right", OTHER.public, DECODE))

    assert trusted.refresh()
    assert trusted.roles_of(OTHER.public) == trusted.roles_of(PAIR.public) == DECODE
    assert problem in " ".join(trusted.problems)
    assert len(trusted.problems) == bool(problem)


@pytest.mark.parametrize("of_the_folder", [True, False])
def test_what_others_could_change_is_not_trusted(trusted: TrustedKeys, of_the_folder: bool) -> None:
    path = trusted.folder if of_the_folder else trusted.folder / "decode-0.toml"
    path.chmod(0o777)
    os.utime(trusted.folder / "decode-0.toml", (1, 1))

    trusted.refresh()

    assert trusted.roles_of(PAIR.public) == NOBODY
    assert f"chmod go-w {path}" in trusted.problems[0]


def test_a_folder_that_is_gone_trusts_nobody_and_one_that_comes_back_does(
    trusted: TrustedKeys,
) -> None:
    away = trusted.folder.with_name("away")
    trusted.folder.rename(away)
    gone = trusted.refresh(), trusted.roles_of(PAIR.public), trusted.problems
    again = trusted.refresh()
    away.rename(trusted.folder)
    back = trusted.refresh(), trusted.roles_of(PAIR.public), trusted.problems

    assert gone[:2] == (True, NOBODY)
    assert "nobody is trusted" in gone[2][0]
    assert not again
    assert back == (True, DECODE, ())


def test_a_process_without_descriptors_trusts_whom_it_trusted(trusted: TrustedKeys) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        lost = trusted.lost(files=True)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert lost is None
    assert trusted.roles_of(PAIR.public) == DECODE


def test_a_key_in_two_files_has_the_roles_of_both_until_one_goes(trusted: TrustedKeys) -> None:
    router = TrustedKey("again", PAIR.public, frozenset((Role.ROUTER,)))
    second = write_trusted(trusted.folder, router)
    came = trusted.refresh(files=False)
    both = trusted.roles_of(PAIR.public)
    seen = trusted.refresh(files=False)
    second.unlink()
    lost = trusted.lost(files=False)

    assert (came, seen, lost) == (True, False, LOST), "a look at the folder alone is enough"
    assert both == {Role.DECODE, Role.ROUTER}
    assert trusted.roles_of(PAIR.public) == DECODE


def test_an_edit_in_place_is_seen_by_a_look_at_the_files(trusted: TrustedKeys) -> None:
    with (trusted.folder / "decode-0.toml").open("r+") as file:
        file.write(file.read().replace("decode", "router"))

    assert not trusted.refresh(files=False)
    assert trusted.lost(files=True) == LOST


@pytest.mark.parametrize("of_the_folder", [True, False])
def test_a_look_at_the_folder_alone_sees_that_a_link_leads_elsewhere_now(
    tmp_path: Path, of_the_folder: bool
) -> None:
    """That to the folder, or, as the kubelet replaces a config map, one in it to its files."""
    for version, pair in (("..1", PAIR), ("..2", OTHER)):
        write_trusted(tmp_path / version, TrustedKey("decode-0", pair.public, DECODE))
    link = tmp_path / "..data"
    link.symlink_to("..1")
    (tmp_path / "decode-0.toml").symlink_to("..data/decode-0.toml")
    keys = read(link if of_the_folder else tmp_path)
    before = keys.roles_of(PAIR.public)

    (tmp_path / "..data_tmp").symlink_to("..2")
    (tmp_path / "..data_tmp").rename(link)

    assert before == DECODE
    assert keys.lost(files=False) == LOST
