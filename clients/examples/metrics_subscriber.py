"""Prints what a daemon publishes: python metrics_subscriber.py [RUNTIME_DIR] [TOPIC ...]. Needs pyzmq and msgpack."""

import secrets
import sys

import msgpack
import zmq

from deepinfer.clients.discovery import locate  # Or read "metrics_endpoint" from daemon.json yourself.

socket: zmq.Socket = zmq.Context.instance().socket(zmq.SUB)
socket.connect(locate(sys.argv[1] if len(sys.argv) > 1 else None).metrics_endpoint or "")
for topic in sys.argv[2:] or ["metrics", "events", "requests", f"replay/{secrets.token_hex(8)}"]:
    socket.subscribe(topic)
expected: dict[str, int] = {}
while True:
    name, message = socket.recv_string(), msgpack.unpackb(socket.recv())
    if "seq" in message:
        seq = message["seq"]
        if lost := seq - expected.setdefault(name, seq):
            print(f"{name}: {lost} messages lost")
        expected[name] = seq + 1
    print(name, message, flush=True)
