"""Another user who was there first: makes a folder, listens in it, says what it was sent."""

import os
import socket
import sys
from pathlib import Path

NOBODY = 65534

folder, name = Path(sys.argv[1]), sys.argv[2]
os.setgid(NOBODY)
os.setuid(NOBODY)
os.umask(0)
folder.mkdir(mode=0o777)
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(str(folder / name))
    listener.listen()
    print("listening", flush=True)
    connected, _ = listener.accept()
    with connected:
        heard, fds, _, _ = socket.recv_fds(connected, 1 << 16, 64)
    print(len(heard), len(fds), flush=True)
