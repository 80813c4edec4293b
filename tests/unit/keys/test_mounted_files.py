"""Keys as Kubernetes mounts them: files of root lent to a group, in a read-only mount."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvbus.bus import new_key_pair
from kvbus.keys.files import write_secret
from kvbus.keys.trusted import TrustedKey, write_trusted
from kvbus.protocol import Role

UID = 10001
UNSHARE = shutil.which("unshare")
READ = """
import os, sys
from pathlib import Path
from kvbus.agent.access import load_ticket_keys
from kvbus.errors import ConfigError
from kvbus.keys.files import read_secret
from kvbus.keys.trusted import TrustedKeys
os.setgroups([int(sys.argv[2])]); os.setgid(int(sys.argv[2])); os.setuid(int(sys.argv[2]))
at = Path(sys.argv[1])
trusted = TrustedKeys(at / "trusted")
print("trusted", *[one.name for one in trusted], *trusted.problems)
for read in (lambda: read_secret(at / "agent.key"), lambda: load_ticket_keys([at / "ticket.key"])):
    try:
        print("read", type(read()).__name__)
    except ConfigError as error:
        print("refused", error.message)
"""
READ_BY_US = ["read KeyPair", "read TicketKeys"]

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or UNSHARE is None, reason="needs root and util-linux"
)


def fill(folder: Path, mode: int) -> None:
    """Write the files of a volume as the kubelet does for a group of UID."""
    pair = new_key_pair()
    write_secret(folder / "agent.key", pair)
    (folder / "ticket.key").write_bytes(os.urandom(32).hex().encode())
    write_trusted(folder / "trusted", TrustedKey("decode-0", pair.public, frozenset({Role.DECODE})))
    for name in ("agent.key", "ticket.key"):
        os.chown(folder / name, 0, UID)
        (folder / name).chmod(mode)
    (folder / "trusted").chmod(0o666)
    folder.chmod(0o755)


def read_as_other_user(folder: Path, *, options: str) -> list[str]:
    """What a user other than root finds there, mounted with these options."""
    mount = f"mount --bind {folder} {folder} && mount -o remount,bind,{options} {folder}"
    command = f'{mount} && exec "$0" -c "$1" {folder} {UID}'
    unshared = [str(UNSHARE), "--mount", "bash", "-c", command, sys.executable, READ]
    return subprocess.check_output(unshared, text=True, timeout=50).splitlines()


@pytest.mark.parametrize(
    ("options", "mode", "trusted", "secrets"),
    [
        ("ro", 0o440, "trusted decode-0", READ_BY_US),
        ("rw", 0o440, "trusted can be changed by others", READ_BY_US),
        ("ro", 0o444, "trusted decode-0", ["others can read the secret in it"] * 2),
    ],
    ids=["lent and read-only", "a file that can be written", "secrets for everybody"],
)
def test_mounted_file_is_read_unless_others_could_read_or_write(
    folder: Path, options: str, mode: int, trusted: str, secrets: list[str]
) -> None:
    fill(folder, mode)
    lines = read_as_other_user(folder, options=options)
    for line, said in zip(lines, [trusted, *secrets], strict=True):
        assert said in line
