"""Another user: gives up root, connects, says what the agent's first words are."""

import os
import socket
import sys

NOBODY = 65534

path = sys.argv[1]
os.setgid(NOBODY)
os.setuid(NOBODY)
with socket.socket(socket.AF_UNIX) as connected:
    connected.connect(path)
    words = b""
    while chunk := connected.recv(65536):
        words += chunk
sys.stdout.buffer.write(words)
