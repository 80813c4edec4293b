"""The attach socket: how an engine passes file descriptors to its agent, and how it dies in sight.

Refuses other users (SO_PEERCRED) and anything that is not exactly this format:

- The socket is a Unix stream socket (``AF_UNIX``, ``SOCK_STREAM``) at a path of the file system.
- Each message, in both directions, is a length of 4 bytes, little-endian and unsigned, and then
  that many bytes: one msgpack map with string keys. The length is at most 65,536 and does not count
  itself.
- File descriptors travel as one SCM_RIGHTS control message that is attached to the first byte of
  the message that names them, the first byte of its length: write the message with one ``sendmsg``
  that carries the control message; if it writes less than all, send the rest without. A message
  carries at most 64. The sender keeps its own copies and may close them when ``sendmsg`` returned.
- The agent answers each message with one message, in order, and sends no descriptors to an engine.
  ``{"ok": {...}}`` is the answer; ``{"error": {"code": str, "message": str, "detail": {...}}}``
  says that the request was not done and why.
- A body that is not a msgpack map gets an error, and the connection goes on. After a broken frame
  (a length too large, descriptors elsewhere or too many, a message not finished within the deadline
  of 10 s) the agent sends an error and closes. A connection that is refused as a whole (wrong user,
  too many connections) gets an error without having asked, and is closed: a client whose write
  fails reads before it gives up. When the agent closes on unread bytes, reading ends with
  ECONNRESET in place of end-of-file, after the error.
- End-of-file means that the other process is gone. An engine keeps its connection open for as long
  as it lives, and lets no child process inherit it.

The memory socket of a prefill agent, at which other agents get its engines' memory, has the same
format; there the agent's answers carry the descriptors.
"""

from kvbus.memory.attach.channel import (
    LENGTH_BYTES,
    MAX_BODY_BYTES,
    FrameChannel,
    close_fds,
    decode_body,
    decode_length,
    encode_error,
    encode_frame,
    open_reply,
)
from kvbus.memory.attach.client import AttachClient
from kvbus.memory.attach.place import (
    ENGINE_SOCKET,
    check_folder,
    check_path_length,
    connect_to_agent,
    listening_at,
    prepare_folder,
)
from kvbus.memory.attach.server import AttachConnection, AttachServer, PassingAnswer

__all__ = [
    "ENGINE_SOCKET",
    "LENGTH_BYTES",
    "MAX_BODY_BYTES",
    "AttachClient",
    "AttachConnection",
    "AttachServer",
    "FrameChannel",
    "PassingAnswer",
    "check_folder",
    "check_path_length",
    "close_fds",
    "connect_to_agent",
    "decode_body",
    "decode_length",
    "encode_error",
    "encode_frame",
    "listening_at",
    "open_reply",
    "prepare_folder",
]
