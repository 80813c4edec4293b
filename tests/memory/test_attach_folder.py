"""Who else could take the place of an agent, by the folders on the way to its sockets."""

import os
import stat
from pathlib import Path

import pytest

from kvbus.errors import ConfigError
from kvbus.memory.attach import check_folder, prepare_folder

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_every_folder_that_is_missing_is_made_for_us_alone(runtime_dir: Path) -> None:
    folder = runtime_dir / "deep" / "deeper" / "agent"
    before = os.umask(0)
    try:
        prepare_folder(folder)
    finally:
        os.umask(before)

    assert [mode_of(path) for path in (folder, *folder.parents[:2])] == [0o700] * 3
    check_folder(folder)


def test_a_folder_that_others_can_enter_is_refused_with_the_command_that_mends_it(
    runtime_dir: Path,
) -> None:
    runtime_dir.chmod(0o710)
    with pytest.raises(ConfigError, match=r"mode 0710.*chmod 0700"):
        prepare_folder(runtime_dir)


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_folder_above_that_others_write_into_is_refused(runtime_dir: Path, mode: int) -> None:
    (runtime_dir / "shared").mkdir()
    (runtime_dir / "shared" / "agent").mkdir(mode=0o700)
    (runtime_dir / "shared").chmod(mode)
    with pytest.raises(ConfigError, match=rf"shared has mode {mode:04o}: .*chmod go-w"):
        prepare_folder(runtime_dir / "shared" / "agent")


def test_a_folder_above_that_others_write_into_may_be_sticky(runtime_dir: Path) -> None:
    (runtime_dir / "tmp").mkdir()
    (runtime_dir / "tmp").chmod(0o1777)

    prepare_folder(runtime_dir / "tmp" / "agent")


def test_a_link_in_place_of_the_folder_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "real").mkdir(mode=0o700)
    (runtime_dir / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="link"):
        prepare_folder(runtime_dir / "link")


def test_a_link_of_ours_on_the_way_is_followed_and_its_folders_are_looked_at(
    runtime_dir: Path,
) -> None:
    (runtime_dir / "real").mkdir(mode=0o700)
    (runtime_dir / "open").mkdir()
    (runtime_dir / "open").chmod(0o777)
    (runtime_dir / "link").symlink_to("open/../real")
    (runtime_dir / "bad").symlink_to(runtime_dir / "open")

    with pytest.raises(ConfigError, match="open has mode 0777"):
        prepare_folder(runtime_dir / "bad" / "agent")
    with pytest.raises(ConfigError, match="open has mode 0777"):
        prepare_folder(runtime_dir / "link" / "agent")
    (runtime_dir / "open").chmod(0o755)
    prepare_folder(runtime_dir / "link" / "agent")


def test_links_that_lead_nowhere_else_end(runtime_dir: Path) -> None:
    (runtime_dir / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="too many links"):
        prepare_folder(runtime_dir / "loop" / "agent")


@pytest.mark.parametrize("below", [".", "agent"])
def test_a_file_in_place_of_a_folder_is_refused(runtime_dir: Path, below: str) -> None:
    (runtime_dir / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot make|not a directory"):
        prepare_folder(runtime_dir / "file" / below)


@as_root
@pytest.mark.parametrize("below", [".", "agent", "deep/agent"])
def test_a_folder_that_another_user_made_first_is_refused_by_its_owner(
    runtime_dir: Path, below: str
) -> None:
    (runtime_dir / "first").mkdir(mode=0o700)
    os.chown(runtime_dir / "first", NOBODY, NOBODY)
    for act in (prepare_folder, check_folder):
        with pytest.raises(ConfigError, match=f"first belongs to uid {NOBODY}.*runtime_dir"):
            act(runtime_dir / "first" / below)

    assert list((runtime_dir / "first").iterdir()) == []


@as_root
def test_a_link_that_another_user_made_first_is_refused(runtime_dir: Path) -> None:
    (runtime_dir / "link").symlink_to(runtime_dir)
    os.chown(runtime_dir / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(ConfigError, match=f"link belongs to uid {NOBODY}"):
        prepare_folder(runtime_dir / "link" / "agent")
