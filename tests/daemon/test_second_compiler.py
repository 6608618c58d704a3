"""The process that compiles kernels beside an engine that starts: when there is one, what it compiles, its end."""

import dataclasses
import json
import logging
import signal
import subprocess
import sys
import time

import psutil
import pytest
from daemon_process import running

from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.foretold import needs_of
from deepinfer.daemon.second_compiler import SecondCompiler
from deepinfer.kernels import kernel_cache
from deepinfer.kernels.codecs import BF16, FP8_E4M3, FP32, INT8
from deepinfer.kernels.cpu.records import P_BF16, P_INT4, P_INT8
from deepinfer.stages.model.registry import find_here

COMPILED = """
import json, sys
import numba
names, made = [], numba.cfunc

def cfunc(*args, **options):
    def decorate(function):
        from deepinfer.kernels.cpu import jit
        names.append(f"{function.__qualname__} {jit._closure_digest(function)}")
        return made(*args, **options)(function) if real else FORETOLD
    return decorate

class FORETOLD:
    address = 0

numba.cfunc = cfunc
from deepinfer.daemon.config import EngineConfig
config = EngineConfig(model=sys.argv[1], num_blocks=64)
real = sys.argv[2] == "start"
if real:
    from deepinfer.daemon.engine_host import EngineHost
    host = EngineHost(config, lambda *progress: None)
    host.warm_up()
    host.close()
else:
    from deepinfer.daemon.foretold import needs_of
    from deepinfer.kernels.cpu.ahead import compile_ahead
    from deepinfer.stages.model.registry import find_here
    compile_ahead(needs_of(config, find_here(config.model)))
print(json.dumps(names))
"""
"""Prints what a start compiles or loads, or what is foretold of it, which is not compiled."""

ORPHAN = """
import os, sys, time
from deepinfer.daemon.config import EngineConfig
from deepinfer.daemon.second_compiler import SecondCompiler
second = SecondCompiler(EngineConfig(model=sys.argv[1], threads=2))
second.start()
print(second._process.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def nothing_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path / "cache"))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("COVERAGE_PROCESS_START", raising=False)


def config_of(path, **settings):
    return EngineConfig(model=str(path), **{"threads": 2, **settings})


def is_started(config):
    second = SecondCompiler(config)
    second.start()
    process = second._process
    second.end()
    assert process is None or not psutil.pid_exists(process.pid)
    return process is not None


def test_a_start_without_kernels_has_a_second_process_and_the_next_one_with_these_settings_has_none(
    tiny_path, nothing_compiled
):
    config = config_of(tiny_path)
    assert is_started(config)
    assert is_started(config), "the first one never became ready"
    SecondCompiler(config).note_start()
    SecondCompiler(config).note_start()
    assert not is_started(config)
    assert not is_started(dataclasses.replace(config, max_running=3, log_level="error"))
    assert is_started(dataclasses.replace(config, kv_cache_dtype="int8"))


@pytest.mark.parametrize("settings", [{"threads": 1}, {"device": "cuda"}, {"device": "host-emulation"}])
def test_there_is_none_on_one_thread_and_on_devices_that_take_none_of_the_kernels(
    settings, tiny_path, nothing_compiled
):
    assert is_started(config_of(tiny_path))
    assert not is_started(config_of(tiny_path, **settings))


def test_there_is_none_for_a_model_that_is_not_here_and_nothing_is_fetched(tmp_path, nothing_compiled):
    assert find_here("org/unheard-of") is None
    assert not is_started(config_of(tmp_path / "missing"))


def test_a_model_that_cannot_work_is_left_to_the_engine_to_refuse(tmp_path, nothing_compiled, caplog):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF, but no more")
    second = SecondCompiler(config_of(broken))
    second.start()
    assert second._process.wait(60) == 0
    second.end()
    assert "ended with" not in caplog.text


def test_one_that_dies_is_told_in_the_log_and_hurts_nobody(tiny_path, nothing_compiled, caplog):
    second = SecondCompiler(config_of(tiny_path))
    with caplog.at_level(logging.INFO):
        second.start()
        second._process.kill()
        second._process.wait()
        second.end()
    assert "compiling kernels in a second process" in caplog.text
    assert f"exit code {-signal.SIGKILL}" in caplog.text


@pytest.mark.parametrize("stopped", [False, True])
def test_it_does_not_outlive_an_engine_that_is_killed(stopped, tiny_path, nothing_compiled):
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(tiny_path)], stdout=subprocess.PIPE) as engine:
        second = psutil.Process(int(engine.stdout.readline()))
        if stopped:
            give_up = time.monotonic() + 60
            while not kernel_cache.cpu_folder().exists() and time.monotonic() < give_up:
                time.sleep(0.02)  # It compiles: that it has asked for a death signal is certain now.
            second.suspend()
        engine.kill()
    assert psutil.wait_procs([second], timeout=20)[1] == []


def test_all_that_a_start_of_the_default_model_calls_for_is_foretold():
    def compiled(how):
        command = [sys.executable, "-c", COMPILED, EngineConfig().model, how]
        return json.loads(subprocess.run(command, check=True, capture_output=True, timeout=300).stdout)

    started, foretold = compiled("start"), compiled("foretell")
    assert len(started) > 8
    assert sorted(foretold) == sorted(started)


def test_settings_and_headers_say_what_a_model_calls_for(tiny_path):
    needs = needs_of(config_of(tiny_path, kv_cache_dtype="int8/e4m3", dtype="bf16", w4_activations="int8"), tiny_path)
    assert (needs.activations, needs.k, needs.v) == (BF16, INT8, FP8_E4M3)
    assert needs.int8_activations
    assert needs_of(config_of(tiny_path, dtype="fp32"), tiny_path)[:1] == (FP32,)
    model = find_here(EngineConfig().model)
    kinds = [(matrices.kind, matrices.out_bf16) for matrices in needs_of(EngineConfig(), model).matrices]
    assert kinds == [(P_INT4, True), (P_INT8, False)]
    assert {matrices.kind for matrices in needs.matrices} <= {P_BF16}


def test_a_cold_start_leaves_no_second_process_when_it_is_ready(tiny_path, folder, monkeypatch):
    mark = SecondCompiler(config_of(tiny_path))._mark
    mark.unlink(missing_ok=True)
    for second in (True, False):
        with running(tiny_path, folder, "--threads", "2") as daemon:
            (engine,) = daemon.children()
            assert "engine_process" in " ".join(engine.cmdline())
            assert ("in a second process" in daemon.log.read_text()) == second
            assert mark.exists()
