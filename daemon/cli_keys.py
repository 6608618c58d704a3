"""The commands that make and list CURVE keys. They talk to no daemon."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from deepinfer.daemon.cli_settings import config_errors

keys_dir_option = click.option(
    "--keys-dir",
    envvar="DEEPINFER_KEYS_DIR",
    help="Folder of the keys. [default: keys in the user's configuration folder]",
)


@click.group("keys")
def keys_group() -> None:
    """Make CURVE keys, and say which clients are let in."""


@keys_group.command()
@click.argument("client", required=False)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=".",
    help="Where the two files of a client go. [default: here]",
)
@keys_dir_option
def new(client: str | None, output: Path, keys_dir: str | None) -> None:
    """Make the daemon's key pair; with CLIENT, a pair for a client of that name. Nothing is written over."""
    from deepinfer.daemon.gate import key_store
    from deepinfer.daemon.keys import new_pair, public_key

    with config_errors():
        files = new_pair(output, client) if client else key_store(keys_dir).new_server()
        key = public_key(os.fspath(files.public)).decode()
    click.echo(f"public key: {key}\nsecret key: in {files.secret}, which only its owner may read")
    if client:
        click.echo(f"on the daemon's machine: deepinfer-daemon keys allow {client} '{key}'")


@keys_group.command()
@click.argument("client")
@click.argument("key")
@keys_dir_option
def allow(client: str, key: str, keys_dir: str | None) -> None:
    """Let CLIENT in, who has the public KEY (40 characters, or the file of it). A running daemon needs a `reload`."""
    from deepinfer.daemon.gate import key_store
    from deepinfer.daemon.keys import public_key

    with config_errors():
        key_store(keys_dir).allow(client, public_key(key))
    click.echo(f"{client} is allowed")


@keys_group.command()
@click.argument("client")
@keys_dir_option
def revoke(client: str, keys_dir: str | None) -> None:
    """Let CLIENT in no more. A running daemon needs a `reload`, and connections that exist go on until it stops."""
    from deepinfer.daemon.gate import key_store

    with config_errors():
        key_store(keys_dir).revoke(client)
    click.echo(f"{client} is not allowed any more")


@keys_group.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@keys_dir_option
def list_keys(as_json: bool, keys_dir: str | None) -> None:
    """The daemon's public key, and who is let in."""
    from deepinfer.daemon.gate import key_store

    with config_errors():
        store = key_store(keys_dir)
        curve, allowed = store.server(), store.allowed()
    server = None if curve is None else curve.public.decode()
    clients = {name: key.decode() for name, key in allowed.items()}
    if as_json:
        click.echo(json.dumps({"server": server, "allowed": clients}, indent=1))
        return
    click.echo(f"daemon: {server or 'no keys yet; make them with: deepinfer-daemon keys new'}")
    for name, key in clients.items():
        click.echo(f"allowed: {key} {name}")
