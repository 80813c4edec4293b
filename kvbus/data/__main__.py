"""``python -m kvbus.data FD``: a data process."""

import ctypes
import os
import resource
import signal
import socket
import struct
import sys
import traceback

_PR_SET_PDEATHSIG = 1
_CREDENTIALS = struct.Struct("3i")


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's library would start threads


def main() -> None:
    passed = int(sys.argv[1])  # high in an agent with many files: `select` rejects it
    sock = socket.socket(fileno=os.dup(passed))
    os.close(passed)
    _die_with_parent(sock)
    for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
        signal.signal(number, signal.SIG_IGN)  # the control process drains, and then closes
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    _serve(sock)


def _serve(sock: socket.socket) -> None:
    from kvbus.data.loop import DataLoop  # noqa: PLC0415  # the parent may exit meanwhile
    from kvbus.data.messages import Log  # noqa: PLC0415
    from kvbus.errors import ClosedError  # noqa: PLC0415
    from kvbus.memory.bus_errors import BusErrors  # noqa: PLC0415
    from kvbus.threads import settle_interpreter  # noqa: PLC0415

    bus_errors = BusErrors()
    bus_errors.install()
    settle_interpreter()
    loop = DataLoop(sock, bus_errors)
    status = 0
    try:
        loop.run()
    except ClosedError:  # the control process has exited, or closed the channel
        pass
    except BaseException:  # jobs in flight cannot complete: the control process restarts this one
        status = 1
        trace = traceback.format_exc()
        loop.log(Log(level="error", event="data.broken", fields={"trace": trace}))
        sys.stderr.write(trace)
        sys.stderr.flush()
    os._exit(status)  # NIXL must not wait for peers, nor a thread for a lock


# The kernel sends no signal if the parent exited before the call. So compare the parent with the
# process that made the channel.
def _die_with_parent(sock: socket.socket) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    made_by = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, _, _ = _CREDENTIALS.unpack(made_by)
    if os.getppid() != pid:
        os._exit(0)


if __name__ == "__main__":
    main()
