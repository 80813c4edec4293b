"""The attach socket: an engine passes file descriptors, and its agent detects its death."""

from kvbus.memory.attach.channel import LENGTH_BYTES as LENGTH_BYTES
from kvbus.memory.attach.channel import MAX_BODY_BYTES as MAX_BODY_BYTES
from kvbus.memory.attach.channel import MAX_FDS as MAX_FDS
from kvbus.memory.attach.channel import FrameChannel as FrameChannel
from kvbus.memory.attach.channel import close_fds as close_fds
from kvbus.memory.attach.channel import decode_body as decode_body
from kvbus.memory.attach.channel import decode_length as decode_length
from kvbus.memory.attach.channel import encode_frame as encode_frame
from kvbus.memory.attach.client import AttachClient as AttachClient
from kvbus.memory.attach.client import query_agent as query_agent
from kvbus.memory.attach.lifeline import AgentLife as AgentLife
from kvbus.memory.attach.lifeline import Lifeline as Lifeline
from kvbus.memory.attach.server import AttachConnection as AttachConnection
from kvbus.memory.attach.server import AttachServer as AttachServer
from kvbus.memory.attach.server import PassingAnswer as PassingAnswer
from kvbus.memory.attach.socket_paths import ENGINE_SOCKET as ENGINE_SOCKET
from kvbus.memory.attach.socket_paths import check_folder as check_folder
from kvbus.memory.attach.socket_paths import connect_to_agent as connect_to_agent
from kvbus.memory.attach.socket_paths import listening_at as listening_at
from kvbus.memory.attach.socket_paths import prepare_folder as prepare_folder
