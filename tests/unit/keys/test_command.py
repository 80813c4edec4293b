"""`kvbus keys`: a key is made, shown, trusted and revoked, and mistakes are one line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvbus.cli import app
from kvbus.keys.files import read_secret


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
    public, file = "-@rT4y{r9p&oQyQGlh2I-Ry18AU:N5cLRM=y[*ls", tmp_path / "trusted"
    trusted = keys("trust", file, public, "--name", "d", "--role", "decode")
    listed = json.loads(keys("show", file, "--json").stdout)["keys"]
    revoked = keys("revoke", file, public)
    mistyped = keys("trust", file, public, "--nam", "d", "--role", "decode")
    assert [one.exit_code for one in (trusted, revoked, mistyped)] == [0, 0, 2]
    assert [one["public_key"] for one in listed] == [public]


def test_trust_takes_file_or_text_and_revoke_takes_name_or_text(secret: Path) -> None:
    file, public = secret.parent / "new" / "trusted", read_secret(secret).public
    by_file = keys("trust", file, secret, "--name", "d", "--role", "decode")
    by_text = keys("trust", file, public, "--name", "e", "--role", "router", "--role", "observer")
    listed = json.loads(keys("show", file, "--json").stdout)["keys"]
    table = keys("show", file).stdout
    by_name = keys("revoke", file, "d")
    by_key = keys("revoke", file, public)
    assert [one.exit_code for one in (by_file, by_text, by_name, by_key)] == [0] * 4
    assert [(one["name"], one["roles"]) for one in listed] == [
        ("d", ["decode"]),
        ("e", ["observer", "router"]),
    ]
    assert all(text in table for text in ("d", "observer, router", public[:20]))
    assert [path.name for path in file.parent.iterdir()] == ["trusted"]
    assert file.read_text() == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("new", "{secret}"), "is there already"),
        (("show", "{file}/none"), "cannot read the key file"),
        (("trust", "{file}", "abc", "--name", "x", "--role", "decode"), "not a key"),
        (("trust", "{file}", "{secret}", "--name", "x", "--role", "king"), "no role 'king'"),
        (("trust", "{file}", "{secret}", "--name", "a b", "--role", "decode"), "not NAME ROLE"),
        (("trust", "{file}", "{secret}", "--name", "#a", "--role", "decode"), "not NAME ROLE"),
        (("trust", "{file}", "{secret}", "--name", "d", "--role", "decode"), "name 'd' already"),
        (("trust", "{secret}/x", "{secret}", "--name", "d", "--role", "decode"), "cannot write"),
        (("revoke", "{file}", "nobody"), "trusts no key 'nobody'"),
        (("revoke", "{file}/none", "d"), "cannot read the key file"),
    ],
)
def test_a_mistake_is_one_line(secret: Path, arguments: tuple[str, ...], message: str) -> None:
    file = secret.parent / "trusted"
    keys("trust", file, secret, "--name", "d", "--role", "decode")
    before = file.read_text()
    ended = keys(*(one.format(secret=secret, file=file) for one in arguments))
    assert ended.exit_code == 2
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert file.read_text() == before


def test_a_file_with_a_line_that_is_left_out_is_shown_with_why(secret: Path) -> None:
    (secret.parent / "wrong").write_text("d  decode  short\n")
    shown = keys("show", secret.parent / "wrong")
    assert (shown.exit_code, shown.stdout) == (1, "")
    assert shown.stderr.startswith("error: ")
    assert ":1: not a key" in shown.stderr
