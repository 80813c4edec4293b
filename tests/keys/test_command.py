"""`kvbus keys`: a key is made, shown, trusted and revoked, and mistakes are one line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.keys import TrustedKeys, read_secret


def keys(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["keys", *map(str, arguments)])


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "decode-0.key"
    assert keys("new", path).exit_code == 0
    return path


def test_a_new_key_is_shown_by_its_public_half_alone(secret: Path) -> None:
    public = read_secret(secret).public

    assert keys("show", secret).stdout == f"{public}\n"
    assert json.loads(keys("show", secret, "--json").stdout) == {"public_key": public}


def test_a_key_that_begins_with_a_dash_is_no_option(tmp_path: Path) -> None:
    public = "-@rT4y{r9p&oQyQGlh2I-Ry18AU:N5cLRM=y[*ls"

    trusted = keys("trust", tmp_path, public, "--name", "d", "--role", "decode")
    listed = json.loads(keys("show", tmp_path, "--json").stdout)["keys"]
    revoked = keys("revoke", tmp_path, public)
    mistyped = keys("trust", tmp_path, public, "--nam", "d", "--role", "decode")

    assert [one.exit_code for one in (trusted, revoked, mistyped)] == [0, 0, 2]
    assert [one["public_key"] for one in listed] == [public]


def test_a_key_is_trusted_by_file_or_text_and_revoked_by_name_or_text(secret: Path) -> None:
    folder, public = secret.parent / "trusted", read_secret(secret).public

    by_file = keys("trust", folder, secret, "--name", "d", "--role", "decode")
    by_text = keys("trust", folder, public, "--name", "e", "--role", "router", "--role", "observer")
    listed = json.loads(keys("show", folder, "--json").stdout)["keys"]
    table = keys("show", folder).stdout
    by_name = keys("revoke", folder, "d")
    by_key = keys("revoke", folder, public)

    assert [one.exit_code for one in (by_file, by_text, by_name, by_key)] == [0] * 4
    assert [(one["name"], one["roles"]) for one in listed] == [
        ("d", ["decode"]),
        ("e", ["observer", "router"]),
    ]
    assert all(text in table for text in ("d", "observer, router", public[:20]))
    assert list(folder.iterdir()) == []
    assert not list(TrustedKeys(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "{secret}"), "is there already"),
        (("show", "{folder}/none"), "cannot read the key file"),
        (("trust", "{folder}", "abc", "--name", "x", "--role", "decode"), "neither a file nor"),
        (("trust", "{folder}", "{secret}", "--name", "x", "--role", "king"), "no role 'king'"),
        (("trust", "{folder}", "{secret}", "--name", "a/b", "--role", "decode"), "--name"),
        (("revoke", "{folder}", "nobody"), "trusts no key 'nobody'"),
    ],
)
def test_a_mistake_is_one_line_and_changes_nothing(
    secret: Path, arguments: tuple[str, ...], message: str
) -> None:
    folder = secret.parent / "trusted"
    folder.mkdir()

    ended = keys(*(one.format(secret=secret, folder=folder) for one in arguments))

    assert ended.exit_code == 2
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert list(folder.iterdir()) == []


def test_a_folder_with_a_file_that_is_left_out_is_shown_with_why(secret: Path) -> None:
    (secret.parent / "wrong.toml").write_text("roles = 7")

    shown = keys("show", secret.parent)

    assert shown.exit_code == 1
    assert "public_key: not a key" in shown.stdout
