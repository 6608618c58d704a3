"""Messages that no request can be, as they come from the client socket."""

from __future__ import annotations

import pytest
import zmq

from deepinfer.stages import client_port
from deepinfer.stages.client_port import FRAMES_SKIPPED, MAX_FRAMES


@pytest.fixture
def pair():
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    client_port.configure(router, 1 << 20)
    router.bind("inproc://clients")
    dealer.connect("inproc://clients")
    yield router, dealer
    router.close(linger=0)
    dealer.close(linger=0)
    context.term()


def test_a_message_of_very_many_frames_is_answered_at_once_and_skipped_over_many_turns(pair):
    """So that streams are served in between. Its sender may be answered meanwhile, and the next message is whole."""
    router, dealer = pair
    total = 10 * FRAMES_SKIPPED
    dealer.send_multipart([b"x"] * total)
    dealer.send_multipart([b"next"])
    (first,) = client_port.receive(router, 64)
    assert first[1:] == [b"x"] * MAX_FRAMES
    turns = 0
    while not (rest := list(client_port.receive(router, 64))):
        assert client_port.send(router, [first[0], b"meanwhile"]) is client_port.Delivery.SENT
        turns += 1
        assert turns < 20
    assert rest == [[first[0], b"next"]]
    assert turns >= total // FRAMES_SKIPPED - 2
    assert dealer.recv() == b"meanwhile"


@pytest.mark.parametrize("count", [1, MAX_FRAMES - 1, MAX_FRAMES, MAX_FRAMES + 1, FRAMES_SKIPPED, FRAMES_SKIPPED + 5])
def test_messages_of_any_length_are_told_apart(pair, count):
    router, dealer = pair
    for _ in range(3):
        dealer.send_multipart([b"a"] * count)
        dealer.send_multipart([b"b", b"c"])
    taken = []
    for _ in range(20):
        taken += [frames[1:] for frames in client_port.receive(router, 2)]
    assert taken == [[b"a"] * min(count, MAX_FRAMES), [b"b", b"c"]] * 3
