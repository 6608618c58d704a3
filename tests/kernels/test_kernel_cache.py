"""Compiled kernels on disk: what is removed, and what never."""

import logging
import os
import subprocess
import sys
import threading
import time

import pytest

from deepinfer.kernels import kernel_cache
from deepinfer.kernels.cuda import disk_cache
from deepinfer.kernels.kernel_cache import (
    IN_USE,
    UNUSED_SECONDS,
    VERSIONS_KEPT,
    hold,
    one_at_a_time,
    remove_unused_files,
    remove_unused_versions,
)

CONTENTS = ("units",)
LONG_AGO = UNUSED_SECONDS + 3600


def make_version(base, number, age=0.0):
    """A folder of kernels that was last written `age` seconds ago."""
    folder = base / f"{number:016x}"
    (folder / "units" / "cpu").mkdir(parents=True)
    (folder / "units" / "cpu" / "kernel.nbc").write_bytes(b"code")
    make_older(folder, age)
    return folder


def make_older(folder, age):
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (time.time() - age,) * 2)


@pytest.fixture
def present(tmp_path):
    folder = tmp_path / "numba" / ("f" * 16)
    hold(folder)
    return folder


def test_versions_that_nobody_has_used_for_long_are_removed_and_the_log_says_so(present, caplog):
    old, recent = make_version(present.parent, 1, LONG_AGO), make_version(present.parent, 2, UNUSED_SECONDS / 2)
    make_older(present, LONG_AGO)
    with caplog.at_level(logging.INFO):
        assert remove_unused_versions(present, CONTENTS) == [old]
    assert not old.exists()
    assert recent.exists()
    assert present.exists()
    assert "removed compiled kernels of 1 other versions" in caplog.text


def test_of_many_recent_versions_those_that_were_used_last_are_kept(present):
    versions = [make_version(present.parent, number, 60.0 * number) for number in range(VERSIONS_KEPT + 2)]
    assert remove_unused_versions(present, CONTENTS) == versions[-2:]


def test_what_is_no_folder_of_kernels_is_never_removed(present):
    """NUMBA_CACHE_DIR may be shared with other programs."""
    base = present.parent
    foreign = make_version(base, 1)
    (foreign / "theirs").mkdir()
    make_older(foreign, LONG_AGO)
    named = make_version(base, 2).rename(base / "package_0123456789ab")
    make_older(named, LONG_AGO)
    linked = base / f"{3:016x}"
    linked.symlink_to(make_version(base.parent / "elsewhere", 3, LONG_AGO))
    (base / f"{4:016x}").write_bytes(b"a file")
    assert remove_unused_versions(present, CONTENTS) == []
    assert foreign.exists()
    assert named.exists()
    assert linked.exists()


def test_a_version_that_a_running_program_uses_is_kept_and_removed_once_it_has_ended(present):
    version = make_version(present.parent, 1)
    code = (
        "import pathlib, sys; from deepinfer.kernels.kernel_cache import hold; "
        "hold(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(version)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"held\n"
        make_older(version, LONG_AGO)
        assert remove_unused_versions(present, CONTENTS) == []
        assert (version / "units" / "cpu" / "kernel.nbc").exists()
        program.stdin.close()
    assert remove_unused_versions(present, CONTENTS) == [version]


def test_who_uses_a_version_dates_it_anew(present):
    version = make_version(present.parent, 1, LONG_AGO)
    hold(version)
    assert kernel_cache._last_used(version) > time.time() - 60


def test_who_comes_while_a_version_is_being_removed_holds_the_new_one(present, monkeypatch):
    """The lock that it waited for was on a file that is gone."""
    version = make_version(present.parent, 1, LONG_AGO)
    comer = threading.Thread(target=hold, args=(version,))
    remove, opened = kernel_cache.shutil.rmtree, threading.Event()
    lock = kernel_cache.fcntl.flock

    def flock(descriptor, how):
        if threading.current_thread() is comer:
            opened.set()
        lock(descriptor, how)

    def rmtree(folder, ignore_errors):
        comer.start()
        assert opened.wait(10)
        remove(folder, ignore_errors)

    monkeypatch.setattr(kernel_cache.fcntl, "flock", flock)
    monkeypatch.setattr(kernel_cache.shutil, "rmtree", rmtree)
    remove_unused_versions(present, CONTENTS)
    comer.join(10)
    make_older(version, LONG_AGO)
    assert (version / IN_USE).exists()
    monkeypatch.setattr(kernel_cache.shutil, "rmtree", remove)
    assert remove_unused_versions(present, CONTENTS) == []


def test_kernels_of_a_gpu_are_removed_when_nobody_has_used_them_for_long(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_cache.VARIABLE, str(tmp_path))
    folder = disk_cache.cache_folder()
    for key in ("cubin-unused", "cubin-used", "cubin-new"):
        disk_cache.store(key, b"code")
    for key in ("cubin-unused", "cubin-used"):
        os.utime(folder / key, (time.time() - LONG_AGO,) * 2)
    assert disk_cache.load("cubin-used") == b"code"
    assert remove_unused_files(folder) == [folder / "cubin-unused"]
    assert disk_cache.load("cubin-unused") is None
    assert disk_cache.load("cubin-new") == b"code"


def locked_by_another(folder):
    """A process that has the lock of `folder` for as long as it lives."""
    code = (
        "import pathlib, sys; from deepinfer.kernels.kernel_cache import one_at_a_time\n"
        "with one_at_a_time(pathlib.Path(sys.argv[1]), 0): print('mine', flush=True); sys.stdin.read()"
    )
    program = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert program.stdout.readline() == b"mine\n"
    return program


def test_who_wants_what_a_killed_process_was_compiling_goes_on_at_once(tmp_path):
    other, come = locked_by_another(tmp_path), threading.Event()

    def want():
        with one_at_a_time(tmp_path, 60.0):
            come.set()

    waiting = threading.Thread(target=want)
    with other:
        waiting.start()
        assert not come.wait(0.3)
        other.kill()
        assert come.wait(10)
    waiting.join()


def test_who_has_waited_long_enough_for_another_compiles_beside_it(tmp_path):
    with locked_by_another(tmp_path) as other:
        began = time.monotonic()
        with one_at_a_time(tmp_path, 0.2):
            assert 0.2 <= time.monotonic() - began < 10
        other.stdin.close()
