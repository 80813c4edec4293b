"""Asks an agent for its status, as the user that it runs as or as another one, and prints it."""

import json
import os
import sys

import msgpack
import zmq

endpoint, uid = sys.argv[1], int(sys.argv[2])
os.setgid(uid)
os.setuid(uid)
with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.RCVTIMEO, 20_000)
    socket.connect(endpoint)
    question = {"v": 1, "op": "status", "id": 1, "boot": f"of {uid}", "body": {}}
    socket.send(msgpack.packb(question))
    print(json.dumps(msgpack.unpackb(socket.recv())))
