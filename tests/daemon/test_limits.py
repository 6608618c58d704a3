"""The operator's limits: set, published, enforced, and what a full queue says."""

from __future__ import annotations

import dataclasses

import pytest

from deepinfer.clients import Client, DeepInferError
from deepinfer.daemon.config import DaemonConfig, LimitsConfig
from deepinfer.daemon.engine import Engine
from deepinfer.stages.protocol import Limits

LONG = {"max_new_tokens": 400, "ignore_eos": True}


def test_every_limit_of_the_protocol_is_a_setting_with_the_same_default():
    names = {field.name for field in dataclasses.fields(LimitsConfig)}
    assert names == Limits().to_dict().keys() - {"vocab_size"}
    assert DaemonConfig().limits() == Limits()
    assert DaemonConfig(max_stops=3).limits() == Limits(max_stops=3)


def test_limits_are_published_and_enforced(tiny_path):
    with Engine(tiny_path, num_blocks=64, limits=Limits(max_stops=2, max_prompt_chars=50, max_new_tokens=30)) as engine:
        published = engine.status()["limits"]
        assert (published["max_stops"], published["max_prompt_chars"], published["max_new_tokens"]) == (2, 50, 30)
        for field, prompt, fields in (
            ("stop", "x", {"stop": ["a", "b", "c"]}),
            ("prompt", "x" * 51, {}),
            ("max_new_tokens", "x", {"max_new_tokens": 31}),
        ):
            with pytest.raises(DeepInferError) as refused:
                engine.complete(prompt, **fields)
            assert refused.value.field == field
        assert len(engine.complete("x" * 50, max_new_tokens=30, ignore_eos=True, stop=["\0", "\1"]).ids) == 30


def test_a_full_queue_says_which_limit_and_when_to_try_again(tiny_path):
    with Engine(tiny_path, num_blocks=64, limits=Limits(max_queue=3, max_streams=2)) as engine:
        second = Client(engine.topology.clients, context=engine.context)
        for _ in range(3):
            streams = [engine.generate("x", **LONG) for _ in range(2)]
            with pytest.raises(DeepInferError) as refused:
                engine.complete("x", **LONG)
            error = refused.value
            assert (error.code, error.retry) == ("queue_full", True)
            assert error.details["limit"] == "max_streams"
            assert error.details["live"] == 2
            assert 0 < error.details["retry_after_s"] < 60
            streams.append(second.generate("x", **LONG))
            with pytest.raises(DeepInferError) as refused:
                second.complete("x", **LONG)
            assert refused.value.details["limit"] == "max_queue"
            assert [len(stream.result().ids) for stream in streams] == [400] * 3
        second.close()


def test_a_thousand_requests_of_one_connection_do_not_hold_up_the_one_of_another(tiny_path):
    with Engine(tiny_path, num_blocks=64, max_running=2) as engine:
        other = Client(engine.topology.clients, context=engine.context)
        crowd = [engine.generate("x", max_new_tokens=4, ignore_eos=True) for _ in range(1000)]
        next(iter(crowd[0]))
        assert len(other.complete("x", max_new_tokens=4, ignore_eos=True).ids) == 4
        waiting = engine.status()["requests"]["live"]
        assert waiting > 800
        for stream in crowd:
            stream.cancel()
        assert all(stream.result().finish_reason in ("length", "cancelled") for stream in crowd)
        other.close()
