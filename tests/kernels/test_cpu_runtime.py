"""Threads, warm-up and what is reported of them."""

import ctypes
import subprocess
import sys

import numba
import numpy as np
import pytest
import torch
from numba import prange
from numba.core.caching import IndexDataCacheFile
from numba.core.registry import cpu_target

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.attention import AttentionSpec
from deepinfer.kernels.cpu import jit
from deepinfer.kernels.cpu.memory import store_int32
from deepinfer.kernels.cpu_runtime import configure_threads, describe, warm_up
from deepinfer.kernels.openmp import SPINS, limit_spinning


def test_threads_are_set_for_torch_and_numba_and_reported():
    before = torch.get_num_threads()
    configure_threads(1)
    assert (torch.get_num_threads(), numba.get_num_threads()) == (1, 1)
    report = describe()
    assert (report["torch_threads"], report["numba_threads"]) == (1, 1)
    configure_threads(min(before, numba.config.NUMBA_NUM_THREADS))


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_a_number_of_threads_that_the_machine_lacks_is_refused(threads):
    with pytest.raises(ValueError, match=f"not {threads}"):
        configure_threads(threads)


def test_the_threading_layer_that_is_reported_is_the_one_in_use():
    warm_up(AttentionSpec(1, 2, 1, 16, 0.25, (0,)), resolve_kv_format("fp16").layout(1, 1, 16, 16), torch.float32)
    layer = describe()["numba_threading_layer"]
    assert layer == "omp" if layer == numba.threading_layer() else layer.startswith("none")


def test_a_function_for_all_threads_does_not_load_the_one_for_one_thread_from_disk(tmp_path, monkeypatch):
    """Both in one cache folder, the one for one thread compiled first: it would then serve as the other."""
    if jit.THREADING_LAYER != "omp":
        pytest.skip("numba has no OpenMP here")
    monkeypatch.setattr(jit, "CACHE_FOLDER", tmp_path)

    def threads_seen(parallel):
        @jit.compiled(numba.void(numba.int64[::1]), parallel=parallel)
        def mark(seen):
            for index in prange(len(seen)):
                seen[index] = numba.get_thread_id()

        seen = np.full(4, -1)
        mark(seen)
        return set(seen)

    before = numba.get_num_threads()
    try:
        numba.set_num_threads(min(2, numba.config.NUMBA_NUM_THREADS))
        for _ in range(2):
            assert threads_seen(parallel=False) == {0}
            assert threads_seen(parallel=True) == set(range(numba.get_num_threads()))
    finally:
        numba.set_num_threads(before)


def test_spinning_is_limited_unless_the_user_has_chosen():
    mine = {"OMP_WAIT_POLICY": "active"}
    limit_spinning(mine)
    assert mine == {"OMP_WAIT_POLICY": "active"}
    empty = {}
    assert limit_spinning(empty) is False
    assert empty == {"GOMP_SPINCOUNT": SPINS}


def test_formats_and_the_spin_limit_need_neither_torch_nor_numba():
    code = (
        "import sys, deepinfer.kernels as k; from deepinfer.kernels.openmp import SPINS, limit_spinning; "
        "k.resolve_kv_format('int8').block_bytes(1, 1, 16, 16); "
        "assert limit_spinning({}) and not {'torch', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("compile_it", [jit.compiled_unit, jit.compiled(), jit.compiled(parallel=True)])
def test_what_closes_over_a_compiled_function_is_refused_for_no_process_would_find_it_on_disk_again(compile_it):
    @jit.helper
    def one_more(number):
        return number + 1

    def made(arguments, index, worker):
        one_more(index)

    with pytest.raises(TypeError, match="made closes over one_more"):
        compile_it(made)


@pytest.mark.parametrize(("make", "expected"), [(jit.helper, 1), (numba.njit, 3)])
def test_helpers_become_machine_code_with_what_calls_them_and_never_by_themselves(make, expected, monkeypatch):
    """The control arm is numba's own way, which makes machine code of each of the three."""
    engine = cpu_target.target_context.codegen()._engine
    finished = []
    monkeypatch.setattr(engine, "finalize_object", lambda: finished.append(engine._ee.finalize_object()))

    @make
    def one_more(number):
        return number + 1

    @make
    def two_more(number):
        return one_more(one_more(number))

    @numba.njit(numba.int64(numba.int64))
    def four_more(number):
        return two_more(two_more(number))

    assert (four_more(38), len(finished)) == (42, expected)


@pytest.mark.parametrize("apart", [True, False])
def test_two_processes_that_compile_at_once_do_not_find_each_others_code_on_disk(apart, tmp_path, monkeypatch):
    """The second one begins when the first has written its index, and is done before that one writes its code. In the
    control arm both share a folder. Neither waits for the other here, as after `PATIENCE`."""
    monkeypatch.setattr(jit, "CACHE_FOLDER", tmp_path)
    monkeypatch.setattr(jit, "PATIENCE", 0.0)
    if not apart:
        monkeypatch.setattr(jit, "_closure_digest", lambda function: "one")

    def address(number):
        def write(arguments, index, worker):
            store_int32(arguments, number)

        return jit.compiled_unit(write).address

    def written_by(place):
        cell = np.zeros(1, np.int32)
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(place)(cell.ctypes.data, 0, 0)
        return cell[0]

    save, begun = IndexDataCacheFile._save_data, []

    def save_late(self, name, data):
        if not begun:
            begun.append(True)
            address(2)
        save(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(IndexDataCacheFile, "_save_data", save_late)
        patch.setattr(IndexDataCacheFile, "_load_index", lambda self: {})
        address(1)
    assert written_by(address(2)) == (2 if apart else 1)
