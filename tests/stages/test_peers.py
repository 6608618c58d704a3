"""Who has left a ROUTER, seen without sending anything."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zmq

from deepinfer.stages import client_port
from deepinfer.stages.peers import Peers


class Port:
    """A ROUTER with its `Peers`, and clients whose contexts are their own, as those of other processes are."""

    def __init__(self, endpoint: str) -> None:
        self.context, self.elsewhere = zmq.Context(), zmq.Context()
        self.router, events = self.context.socket(zmq.ROUTER), self.context.socket(zmq.PAIR)
        client_port.configure(self.router, 1000)
        self.peers = Peers(self.router, events)
        self.router.bind(endpoint)
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.events = events

    def client(self, kind: int = zmq.DEALER) -> zmq.Socket:
        socket = self.elsewhere.socket(kind)
        socket.linger = 1000
        socket.connect(self.endpoint)
        return socket

    def receive(self, count: int = 1) -> list[bytes]:
        """The senders of the next `count` messages."""
        senders: list[bytes] = []
        while len(senders) < count:
            assert self.router.poll(5000)
            senders += [frames[0] for frames in client_port.receive(self.router, count - len(senders), self.peers)]
        return senders

    def left(self, count: int = 1) -> list[bytes]:
        """Until `count` clients are known to have left. One is told of again for each message read after it left."""
        give_up = time.monotonic() + 10
        gone: list[bytes] = []
        while len(set(gone)) < count and time.monotonic() < give_up:
            self.events.poll(100)
            gone += self.peers.left()
        return gone


@pytest.fixture(params=["ipc", "tcp"])
def port(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Port]:
    folder = tmp_path_factory.mktemp("p")
    opened = Port("tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{folder}/s")
    yield opened
    opened.peers.close()
    opened.elsewhere.destroy(linger=0)
    opened.context.destroy(linger=0)


@pytest.mark.parametrize("kind", [zmq.DEALER, zmq.REQ])
def test_a_client_that_closes_its_socket_is_known_to_have_left_and_others_are_not(port, kind):
    leaver, stayer = port.client(kind), port.client()
    leaver.send(b"a")
    (gone,) = port.receive()
    stayer.send(b"b")
    port.receive()
    assert port.peers.left() == []
    leaver.close()
    assert port.left() == [gone]
    stayer.send(b"c")
    port.receive()
    assert port.peers.left() == []


def test_a_client_that_left_before_its_message_was_read_is_known_to_have_left(port):
    client = port.client()
    client.send(b"a")
    client.close()
    assert port.router.poll(5000)
    while port.events.poll(300):
        assert port.peers.left() == []
    (gone,) = port.receive()
    assert port.peers.left() == [gone]


def test_every_message_that_is_read_after_its_client_left_says_so_again(port):
    """Whoever acted on the first one has forgotten that client when the second one asks for something."""
    client = port.client()
    client.send(b"a")
    client.send(b"b")
    client.close()
    assert port.router.poll(5000)
    while port.events.poll(300):
        assert port.peers.left() == []
    for _ in range(2):
        (gone,) = port.receive()
        assert port.peers.left() == [gone]


def test_clients_that_come_and_go_on_the_same_descriptor_are_told_apart(port):
    """Messages of the dead are read after their descriptor has been given to others who are alive."""
    for _ in range(8):
        for number in range(3):
            client = port.client()
            client.send(b"%d" % number)
            client.send(b"again")
            client.close()
        stayer = port.client()
        stayer.send(b"here")
        senders = port.receive(7)
        alive = next(s for s in senders if senders.count(s) == 1)
        gone = set(port.left(3))
        assert gone == set(senders) - {alive}
        stayer.close()
        assert port.left() == [alive]


def test_what_a_client_said_before_it_left_is_not_taken_for_the_words_of_the_next_one(port):
    leaver = port.client()
    leaver.send(b"a")
    leaver.send(b"b")
    (gone,) = port.receive()
    assert port.router.poll(5000)
    late, _ = port.router.recv_multipart(copy=False)
    leaver.close()
    assert port.left() == [gone]
    stayer = port.client()
    stayer.send(b"c")
    (alive,) = port.receive()
    port.peers.note(late)
    assert port.peers.left() == [gone]
    stayer.close()
    assert port.left() == [alive]


def test_a_client_inside_the_process_is_not_watched():
    context = zmq.Context()
    router, events, client = context.socket(zmq.ROUTER), context.socket(zmq.PAIR), context.socket(zmq.DEALER)
    peers = Peers(router, events)
    router.bind("inproc://here")
    client.connect("inproc://here")
    client.send(b"a")
    peers.note(router.recv(copy=False))
    client.close()
    assert peers.left() == []
    peers.close()
    context.destroy(linger=0)
