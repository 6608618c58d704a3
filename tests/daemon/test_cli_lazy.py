"""Commands come from their modules when they are called."""

import subprocess
import sys

import click

from deepinfer.daemon.cli import main


def test_every_command_that_is_listed_is_there_under_its_own_name():
    context = click.Context(main)
    names = main.list_commands(context)
    assert {"start", "status", "bench", "stress", "kv-quality", "validate-kernels"} <= set(names)
    assert [main.get_command(context, name).name for name in names] == names
    assert main.get_command(context, "no-such-command") is None


def test_a_command_that_does_not_measure_begins_without_the_modules_that_do():
    program = "import sys, deepinfer.daemon.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "deepinfer.daemon.cli" in loaded
    assert not {"numpy", "torch", "deepinfer.daemon.cli_bench", "deepinfer.daemon.cli_stress"} & set(loaded)
