"""Key files: what is refused, with what to do about it, and never with the secret key."""

import os
from pathlib import Path

import pytest

from kvbus.bus import new_key_pair
from kvbus.errors import ConfigError
from kvbus.keys import Role, TrustedKey, TrustedKeys, read_secret, write_secret, write_trusted

PAIR = new_key_pair()
DECODE = frozenset((Role.DECODE,))


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "agent.key"
    write_secret(path, PAIR)
    return path


@pytest.fixture
def trusted(tmp_path: Path) -> TrustedKeys:
    write_trusted(tmp_path / "trusted", TrustedKey("decode-0", PAIR.public, DECODE))
    keys = TrustedKeys(tmp_path / "trusted")
    keys.refresh()
    return keys


def test_a_secret_file_is_for_its_owner_alone_and_reads_back(secret: Path) -> None:
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read_secret(secret) == PAIR
    assert PAIR.secret not in repr(PAIR)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o666, 0o660])
def test_a_secret_file_that_others_can_read_or_write_is_refused(secret: Path, mode: int) -> None:
    secret.chmod(mode)

    with pytest.raises(ConfigError, match="chmod"):
        read_secret(secret)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no secret_key"),
        ("no toml", "not TOML"),
        ('secret_key = "short"', "5 characters in place of 40"),
        (f'secret_key = "{"~" * 40}"', "not of Z85"),
        (f'public_key = "x"\nsecret_key = "{PAIR.secret}"', "not that of secret_key"),
        ("#" * 5000, "larger than 4096 bytes"),
    ],
    ids=["empty", "text", "short", "alphabet", "pair", "large"],
)
def test_a_wrong_key_file_is_refused_by_name_without_its_secret(
    secret: Path, text: str, message: str
) -> None:
    secret.write_text(text)

    with pytest.raises(ConfigError, match=message) as refused:
        read_secret(secret)

    assert str(secret) in refused.value.message
    assert PAIR.secret not in refused.value.message


def test_a_key_file_that_is_not_there_and_one_that_is_are_refused_by_name(secret: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the key file"):
        read_secret(secret.with_name("none"))
    with pytest.raises(ConfigError, match="is there already"):
        write_secret(secret, PAIR)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "public_key: not a key"),
        (f'public_key = "{PAIR.public}"', "roles is not a list"),
        (f'public_key = "{PAIR.public}"\nroles = ["king"]', "there is no role 'king'"),
        (f'public_key = "{PAIR.public}"\nroles = [7]', "there is no role 7"),
        (f'public_key = "{PAIR.public}"\nrole = "decode"', "'role' is not known"),
    ],
    ids=["key", "roles", "role", "number", "name"],
)
def test_a_trusted_file_that_makes_no_sense_trusts_nobody_and_leaves_others(
    trusted: TrustedKeys, text: str, problem: str
) -> None:
    other = new_key_pair()
    (trusted.folder / "wrong.toml").write_text(text)
    write_trusted(trusted.folder, TrustedKey("right", other.public, DECODE))

    assert trusted.refresh()
    assert trusted.roles_of(other.public) == trusted.roles_of(PAIR.public) == DECODE
    assert len(trusted.problems) == 1
    assert problem in trusted.problems[0]


@pytest.mark.parametrize("of_the_folder", [True, False])
def test_what_others_could_change_is_not_trusted(trusted: TrustedKeys, of_the_folder: bool) -> None:
    path = trusted.folder if of_the_folder else trusted.folder / "decode-0.toml"
    path.chmod(0o777)
    os.utime(trusted.folder / "decode-0.toml", (1, 1))

    trusted.refresh()

    assert trusted.roles_of(PAIR.public) == frozenset()
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

    assert gone[:2] == (True, frozenset())
    assert "nobody is trusted" in gone[2][0]
    assert not again
    assert back == (True, DECODE, ())


def test_a_key_in_two_files_has_the_roles_of_both_until_one_goes(trusted: TrustedKeys) -> None:
    second = write_trusted(
        trusted.folder, TrustedKey("again", PAIR.public, frozenset((Role.ROUTER,)))
    )
    trusted.refresh()
    both = trusted.roles_of(PAIR.public)
    second.unlink()
    trusted.refresh()

    assert both == {Role.DECODE, Role.ROUTER}
    assert trusted.roles_of(PAIR.public) == DECODE


def test_a_look_at_the_folder_alone_sees_keys_that_came_or_went(trusted: TrustedKeys) -> None:
    quiet = trusted.refresh(files=False)
    added = write_trusted(trusted.folder, TrustedKey("new", new_key_pair().public, DECODE))
    came = trusted.refresh(files=False)
    seen = trusted.refresh(files=False)
    added.unlink()
    went = trusted.refresh(files=False)

    assert (quiet, came, seen, went) == (False, True, False, True)


def test_a_look_at_the_folder_alone_reads_no_file_and_one_at_the_files_sees_edits_in_place(
    trusted: TrustedKeys,
) -> None:
    with (trusted.folder / "decode-0.toml").open("r+") as file:
        file.write(file.read().replace("decode", "router"))
    of_the_folder = trusted.refresh(files=False)
    of_the_files = trusted.lost(files=True)

    assert not of_the_folder
    assert of_the_files == frozenset({PAIR.public})


def test_a_look_at_the_folder_alone_sees_that_a_config_map_was_replaced(tmp_path: Path) -> None:
    """The kubelet makes a new folder, and renames a link to it over the one of before."""
    mounted = tmp_path / "trusted"
    for version, pair in (("..1", PAIR), ("..2", new_key_pair())):
        write_trusted(mounted / version, TrustedKey("decode-0", pair.public, DECODE))
    (mounted / "..data").symlink_to("..1")
    (mounted / "decode-0.toml").symlink_to("..data/decode-0.toml")
    keys = TrustedKeys(mounted)
    keys.refresh()
    before = keys.roles_of(PAIR.public)

    (mounted / "..data_tmp").symlink_to("..2")
    (mounted / "..data_tmp").rename(mounted / "..data")

    assert before == DECODE
    assert keys.lost(files=False) == frozenset({PAIR.public})


def test_a_link_to_a_folder_that_leads_elsewhere_now_is_read_again(trusted: TrustedKeys) -> None:
    link = trusted.folder.with_name("link")
    link.symlink_to(trusted.folder)
    other = trusted.folder.with_name("other")
    other.mkdir(mode=0o755)
    keys = TrustedKeys(link)
    keys.refresh()

    link.unlink()
    link.symlink_to(other)

    assert keys.lost(files=False) == frozenset({PAIR.public})


def test_a_file_that_goes_while_the_folder_is_read_costs_nobody_else_its_trust(
    trusted: TrustedKeys,
) -> None:
    (trusted.folder / "gone.toml").symlink_to(trusted.folder / "nothing")

    trusted.refresh()

    assert trusted.roles_of(PAIR.public) == DECODE
