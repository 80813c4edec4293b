"""What is read out of the words of UCX, NIXL and Python."""

from kvbus.doctor.children import reason_in
from kvbus.doctor.nixl import ucx_transports_in, ucx_version_in, wire_in

BEFORE = "[1795253608.408744] [vm:342  :0]   "


def table(title: str, *rows: str) -> str:
    lines = ["+---+", f"| reader/342 {title} |", "+---+"]
    if rows:
        lines = ["+---+", f"| {title} |", "+---+", "| Range | Description | Config |", "+---+"]
        lines += [f"| {row} |" for row in rows] + ["+---+"]
    return "\n".join(BEFORE + line for line in lines)


def test_the_wire_is_that_of_large_reads() -> None:
    log = "\n".join(
        [
            table("active message by ucp_am_send*", "0..inf | zero-copy | tcp/lo"),
            table(
                "remote memory read by ucp_get*(multi) into host memory",
                "0..99 | short | rc_mlx5/mlx5_0:1",
                "100..inf | zero-copy | cma/memory",
            ),
            table("remote memory write by ucp_put*", "0..inf | zero-copy | sysv/memory"),
        ]
    )

    assert wire_in(log) == "cma/memory"


def test_the_wire_after_the_last_change_counts() -> None:
    title = "remote memory read by ucp_get*"
    log = table(title, "0..inf | x | tcp/lo") + "\n" + table(title, "0..inf | x | cma/memory")

    assert wire_in(log) == "cma/memory"


def test_without_a_table_there_is_no_wire() -> None:
    assert wire_in("nothing | of | that") == ""


def test_the_first_error_of_ucx_is_the_reason() -> None:
    log = (
        f"{BEFORE}       select.c:722  UCX  ERROR   no active messages transport\n"
        "E1121 09:33:36.109193     402 ucx_utils.cpp:635] endpoint create failed\n"
        f"{BEFORE}       other.c:1  UCX  ERROR   something later\n"
        "Traceback\n"
        "kvbus.errors.TransferFailed: no NIXL agent\n"
    )

    assert reason_in(log) == "no active messages transport"


def test_without_one_it_is_that_of_nixl() -> None:
    log = "E1121 09:33:38.109011     408 nixl_agent.cpp:342] backend creation failed\nlast line\n"

    assert reason_in(log) == "backend creation failed"


def test_without_any_it_is_the_last_line() -> None:
    assert reason_in("Traceback\n  File\nModuleNotFoundError: No module named 'nixl'\n\n") == (
        "ModuleNotFoundError: No module named 'nixl'"
    )
    assert reason_in("\n") == ""


def test_transports_and_version_of_ucx_are_found() -> None:
    log = (
        f"{BEFORE} ucp_context.c:2753 UCX  INFO  Version 1.23.0 (loaded from somewhere)\n"
        f"{BEFORE} ucp_context.c:1508 UCX  WARN  transport 'rc' is not available, please use one"
        " or more of: cma, mm, tcp\n"
    )

    assert ucx_transports_in(log) == ("cma", "mm", "tcp")
    assert ucx_version_in(log) == "1.23.0"
    assert ucx_transports_in("") == ()
    assert ucx_version_in("") == ""
