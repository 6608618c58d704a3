"""Folders and settings in which something is wrong: every command says what, in one sentence, and does not hang."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from daemon_process import run_cli

from deepinfer.daemon.cli import main
from deepinfer.daemon.commands import EXIT_FAILED, NoDaemon, connection
from deepinfer.daemon.config import DaemonConfig
from deepinfer.daemon.runtime_folder import FolderError, RuntimeFolder
from deepinfer.daemon.setting import ConfigError
from deepinfer.daemon.sources import gather
from deepinfer.daemon.topology import two_processes


def invoke(*arguments: str) -> click.testing.Result:
    result = CliRunner().invoke(main, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def private(folder):
    folder.mkdir(mode=0o700)
    return folder


def as_link(path):
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("make", [as_link, os.mkdir], ids=["a link", "a folder"])
@pytest.mark.parametrize("command", ["status", "stop", "logs", "reload", "dump", "top", "start"])
def test_a_lock_that_is_no_file_is_named(private, command, make):
    make(private / "daemon.lock")
    result = invoke(command, "--runtime-dir", str(private))
    assert result.exit_code == 78
    assert f"runtime_dir: {private}/daemon.lock" in result.output


@pytest.mark.parametrize("name", ["daemon.json", "clients.sock", "daemon.tmp"])
def test_a_folder_in_the_place_of_a_leftover_is_named_and_the_lock_given_back(private, name):
    (private / name).mkdir()
    with pytest.raises(FolderError, match=f"{name} is in the way"):
        RuntimeFolder(private)
    assert {path.name for path in private.iterdir()} == {name}


def test_what_a_crash_left_of_a_connection_file_is_cleared_and_a_link_there_is_not_followed(private, tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (private / "daemon.tmp").symlink_to(other)
    held = RuntimeFolder(private)
    held.publish({"endpoint": "ipc:///x"})
    held.release()
    assert other.read_text() == "mine"
    assert list(private.iterdir()) == []


@pytest.mark.parametrize("make", [as_link, os.mkdir, os.mkfifo], ids=["a link", "a folder", "a pipe"])
@pytest.mark.parametrize("command", [["logs"], ["start", "--detach"]], ids=["logs", "start"])
def test_a_log_that_is_no_file_is_named_and_nobody_waits_for_it(private, command, make):
    make(private / "daemon.log")
    result = run_cli(*command, runtime_dir=private, seconds=30)
    assert result.returncode == 78
    assert f"runtime_dir: {private}/daemon.log is no plain file" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("content", ["", '{"endpoint":', "[1]", '{"endpoint": 5}', '"x"', "\xff"])
def test_a_connection_file_that_is_none_is_named_while_somebody_holds_the_lock(private, content):
    (private / "daemon.json").write_text(content, encoding="latin-1")
    with (private / "daemon.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NoDaemon, match="connection file") as raised:
            connection(private)
    assert raised.value.code == EXIT_FAILED


def test_a_start_that_fails_early_leaves_no_lock(private, tmp_path, monkeypatch):
    keys = tmp_path / "keys"
    assert invoke("keys", "new", "--keys-dir", str(keys)).exit_code == 0
    (keys / "allowed").mkdir(mode=0o700)
    (keys / "allowed" / "x.key").write_text("no key")
    result = run_cli("start", "--curve", "--keys-dir", str(keys), runtime_dir=private)
    assert result.returncode == 78
    assert "x.key" in result.stderr
    assert list(private.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("max_queue", 2**53, "it must be at most 9007199254740991"),
        ("max_frame_bytes", 2**31, "it must be at most 2147483647"),
        ("model", "a\0b", "UTF-8 text without a NUL"),
        ("model", "\udcff", "UTF-8 text without a NUL"),
    ],
)
def test_a_value_that_no_client_could_be_told_is_refused(name, value, words):
    with pytest.raises(ConfigError, match=words) as raised:
        DaemonConfig(**{name: value}).check()
    assert raised.value.name == name
    DaemonConfig(max_queue=2**53 - 1, max_frame_bytes=2**31 - 1, model="é").check()


@pytest.mark.parametrize("options", [[], ["--detach"]], ids=["in the foreground", "detached"])
def test_a_runtime_folder_with_too_long_a_path_is_not_even_made(tmp_path, options):
    folder = tmp_path / ("x" * 100)
    result = invoke("start", "--runtime-dir", str(folder), *options)
    assert result.exit_code == 78
    assert "107" in result.output
    assert not folder.exists()


def test_a_runtime_folder_whose_name_is_no_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"runtime_dir is .*must be UTF-8"):
        two_processes(tmp_path / os.fsdecode(b"\xff"))


def test_a_configuration_file_without_end_is_refused():
    with pytest.raises(ConfigError, match="/dev/zero has more than 1048576 bytes"):
        gather({}, Path("/dev/zero"), {})
