"""Keys as Kubernetes mounts them: files of root lent to a group, in folders that cannot be changed.

Needs root: another user reads what root has mounted, in a mount namespace of their own.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from kvbus.bus import new_key_pair
from kvbus.keys import Role, TrustedKey, write_secret, write_trusted

UID = 10001
UNSHARE = shutil.which("unshare")
READ = """
import os, sys
from pathlib import Path
from kvbus.agent import load_ticket_keys
from kvbus.errors import ConfigError
from kvbus.keys import read_secret
from kvbus.keys import TrustedKeys
os.setgroups([int(sys.argv[2])]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
at = Path(sys.argv[1])
trusted = TrustedKeys(at / "trusted")
trusted.refresh()
print("trusted", *[one.name for one in trusted], *trusted.problems)
for read in (lambda: read_secret(at / "agent.key"), lambda: load_ticket_keys([at / "ticket.key"])):
    try:
        print("read", type(read()).__name__)
    except ConfigError as error:
        print("refused", error.message)
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or UNSHARE is None, reason="needs root and util-linux"
)


@pytest.fixture
def mounted() -> Iterator[Path]:
    """A folder with the files of a volume, as the kubelet writes them for a group of UID."""
    with TemporaryDirectory() as name:  # another user must get there
        yield volume(Path(name))


def volume(folder: Path) -> Path:
    """Fill the folder."""
    pair = new_key_pair()
    write_secret(folder / "agent.key", pair)
    (folder / "ticket.key").write_bytes(os.urandom(32).hex().encode())
    write_trusted(folder / "trusted", TrustedKey("decode-0", pair.public, frozenset({Role.DECODE})))
    for name in ("agent.key", "ticket.key"):
        os.chown(folder / name, 0, UID)
        (folder / name).chmod(0o440)
    (folder / "trusted").chmod(0o777)
    folder.chmod(0o755)
    return folder


def read_as_other_user(folder: Path, *, options: str) -> list[str]:
    """What a user other than root finds there, mounted with these options."""
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,{options} {folder}"
    command = f'{mount} && exec "$0" -c "$1" {folder} {UID}'
    ended = subprocess.run(
        [str(UNSHARE), "--mount", "bash", "-c", command, sys.executable, READ],
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    return ended.stdout.splitlines()


def test_secrets_are_lent_and_a_folder_that_is_mounted_read_only_is_trusted(mounted: Path) -> None:
    assert read_as_other_user(mounted, options="ro") == [
        "trusted decode-0",
        "read KeyPair",
        "read TicketKeys",
    ]


def test_the_same_folder_is_not_trusted_where_it_can_be_written(mounted: Path) -> None:
    trusted, *_ = read_as_other_user(mounted, options="rw")

    assert "trusted can be changed by others" in trusted


def test_secrets_that_everybody_can_read_are_refused_also_read_only(mounted: Path) -> None:
    for name in ("agent.key", "ticket.key"):
        (mounted / name).chmod(0o444)

    _, *secrets = read_as_other_user(mounted, options="ro")

    assert all("refused" in one and "others can read the secret in it" in one for one in secrets)
