"""CURVE keys and the list of allowed clients: on disk, on the sockets, in the clients, on the command line."""

from __future__ import annotations

import asyncio
import json
import socket
import stat

import pytest
import zmq
from click.testing import CliRunner
from daemon_process import nothing_left, run_cli, running, started

from deepinfer.clients import AccessDeniedError, AsyncClient, Client, InvalidRequestError
from deepinfer.clients.discovery import locate
from deepinfer.daemon.cli import main
from deepinfer.daemon.endpoints import is_open
from deepinfer.daemon.gate import Gate
from deepinfer.daemon.keys import KeyStore, new_pair, public_key
from deepinfer.daemon.setting import ConfigError
from deepinfer.stages.curve import Curve

PROMPT = {"max_new_tokens": 3, "ignore_eos": True}


def own_address() -> str:
    """An address of this machine that is not its loopback one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # Sends nothing: it only chooses the address to send from.
        except OSError:
            pytest.skip("this machine has no address but loopback")
        return probe.getsockname()[0]


def invoke(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.fixture
def store(tmp_path):
    return KeyStore(tmp_path / "keys")


def test_keys_are_made_once_and_only_their_owner_can_read_them(tmp_path):
    folder = tmp_path / "keys"
    made = invoke("keys", "new", "--keys-dir", str(folder))
    assert made.exit_code == 0, made.output
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("server.key", "server.key_secret"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    key = KeyStore(folder).server().public.decode()
    assert key in made.output
    assert KeyStore(folder).server().secret.decode() not in made.output
    again = invoke("keys", "new", "--keys-dir", str(folder))
    assert again.exit_code == 78
    assert "never written over" in again.output
    assert KeyStore(folder).server().public.decode() == key


def test_clients_are_allowed_listed_and_revoked(tmp_path):
    keys_dir = ["--keys-dir", str(tmp_path / "keys")]
    made = invoke("keys", "new", "laptop", "--output", str(tmp_path))
    assert made.exit_code == 0, made.output
    key = public_key(str(tmp_path / "laptop.key")).decode()
    assert f"keys allow laptop '{key}'" in made.output
    assert invoke("keys", "allow", "laptop", key, *keys_dir).exit_code == 0
    assert invoke("keys", "allow", "desktop", str(tmp_path / "laptop.key"), *keys_dir).exit_code == 0
    assert invoke("keys", "allow", "laptop", key, *keys_dir).exit_code == 78
    listed = json.loads(invoke("keys", "list", "--json", *keys_dir).output)
    assert listed == {"server": None, "allowed": {"laptop": key, "desktop": key}}
    assert invoke("keys", "revoke", "laptop", *keys_dir).exit_code == 0
    missing = invoke("keys", "revoke", "laptop", *keys_dir)
    assert missing.exit_code == 78
    assert "known: desktop" in missing.output


@pytest.mark.parametrize("name", ["../evil", "", "a/b", ".hidden", "x" * 65])
def test_a_name_that_could_leave_the_folder_is_refused(store, name):
    with pytest.raises(ConfigError, match="no name for a key"):
        store.allow(name, zmq.curve_keypair()[0])


@pytest.mark.parametrize("text", ["", "x" * 39, "x" * 41, '"' * 40, "/nowhere/laptop.key"])
def test_what_is_no_public_key_is_refused(text):
    with pytest.raises(ConfigError, match="neither a public key"):
        public_key(text)


def test_key_files_that_others_can_read_are_refused(store, tmp_path):
    store.new_server()
    (store.folder / "server.key_secret").chmod(0o644)
    with pytest.raises(ConfigError, match="0600"):
        store.server()
    store.folder.chmod(0o755)
    with pytest.raises(ConfigError, match=r"keys_dir: .* must belong to this user"):
        store.allowed()
    pair = new_pair(tmp_path, "me")
    server = zmq.curve_keypair()[0].decode()
    assert locate("tcp://x:1", server, pair.secret).curve["server_key"] == server
    for wrong in ((server, None), (None, pair.secret), ("short", pair.secret), (server, tmp_path / "absent")):
        with pytest.raises(InvalidRequestError):
            locate("tcp://x:1", *wrong)
    pair.secret.chmod(0o640)
    with pytest.raises(InvalidRequestError, match="0600"):
        locate("tcp://x:1", server, pair.secret)


def test_which_addresses_other_machines_can_reach():
    assert not any(map(is_open, ("ipc:///x/y", "tcp://127.0.0.1:5", "tcp://localhost:5", "tcp://[::1]:5")))
    assert all(map(is_open, ("tcp://0.0.0.0:5", "tcp://*:5", "tcp://10.0.0.1:5", "tcp://eth0:5", "tcp://[::]:5")))


def asks(endpoint: str, curve: tuple | None, refused: bool = False) -> bool:
    """Whether a ROUTER at `endpoint` lets a client with these keys in and answers; it is given less time to refuse."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        if curve is not None:
            dealer.curve_serverkey, dealer.curve_publickey, dealer.curve_secretkey = curve
        dealer.connect(endpoint)
        dealer.send(b"hello")
        return bool(dealer.poll(700 if refused else 20_000))
    finally:
        dealer.close()
        context.term()


class Echo:
    """A ROUTER that answers, behind a gate or, as the control arm, without one."""

    def __init__(self, store: KeyStore, gated: bool) -> None:
        import threading

        self.context = zmq.Context()
        curve = store.server() or Curve(*zmq.curve_keypair())
        self.gate = Gate(self.context, curve, store) if gated else None
        self.router = self.context.socket(zmq.ROUTER)
        self.router.setsockopt(zmq.LINGER, 0)
        curve.secure(self.router)
        self.router.bind("tcp://127.0.0.1:*")
        self.endpoint = self.router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.server_key = curve.public
        self.running = True
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while self.running:
            if self.router.poll(20):
                self.router.send_multipart(self.router.recv_multipart())

    def close(self) -> None:
        self.running = False
        self.thread.join()
        self.router.close()
        if self.gate is not None:
            self.gate.close()
        self.context.term()


@pytest.fixture
def echo(store, request):
    store.new_server()
    echo = Echo(store, getattr(request, "param", True))
    yield echo
    echo.close()


def test_only_allowed_keys_pass_the_gate_and_a_reload_takes_effect(store, echo):
    friend, stranger = zmq.curve_keypair(), zmq.curve_keypair()
    assert not asks(echo.endpoint, (echo.server_key, *friend), refused=True)
    store.allow("friend", friend[0])
    assert not asks(echo.endpoint, (echo.server_key, *friend), refused=True)
    assert echo.gate.reload() == 1
    assert asks(echo.endpoint, (echo.server_key, *friend))
    assert not asks(echo.endpoint, (echo.server_key, *stranger), refused=True)
    assert not asks(echo.endpoint, None, refused=True)
    local = echo.gate.connection()
    assert asks(echo.endpoint, tuple(local[name].encode() for name in ("server_key", "public_key", "secret_key")))
    store.revoke("friend")
    assert echo.gate.reload() == 0
    assert not asks(echo.endpoint, (echo.server_key, *friend), refused=True)


@pytest.mark.parametrize("echo", [False], indirect=True)
def test_without_the_gate_any_key_would_pass(echo):
    """The control arm: this is what the ZAP handler is for."""
    assert asks(echo.endpoint, (echo.server_key, *zmq.curve_keypair()))


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("d", numbered=True) / "run"


@pytest.mark.parametrize("option", ["--endpoint", "--control-endpoint"])
def test_an_open_address_without_keys_or_clients_is_refused_in_one_line(tiny_path, folder, store, option):
    arguments = [option, "tcp://0.0.0.0:*", "--keys-dir", str(store.folder)]
    for words in ("deepinfer-daemon keys new", "no client is allowed"):
        with started(tiny_path, folder, *arguments) as daemon:
            assert daemon.wait_end(60) == 78
            log = daemon.log.read_text().strip()
            assert "\n" not in log
            assert "0.0.0.0:* is not a loopback address" in log
            assert words in log
            nothing_left(folder)
            if store.server() is None:
                store.new_server()


def test_an_open_daemon_serves_clients_that_are_allowed_and_no_others(tiny_path, folder, store, tmp_path):
    """Over an address of this machine that is not loopback; the CLI, both Python clients, and the control socket."""
    store.new_server()
    friend, stranger = new_pair(tmp_path, "friend"), new_pair(tmp_path, "stranger")
    store.allow("friend", public_key(str(friend.public)))
    server_key = store.server().public.decode()
    address = own_address()
    options = [
        *("--endpoint", f"tcp://{address}:*", "--control-endpoint", f"tcp://{address}:*"),
        *("--metrics-endpoint", f"tcp://{address}:*"),
        *("--keys-dir", str(store.folder), "--num-blocks", "32"),
    ]
    with running(tiny_path, folder, *options) as daemon:
        connection = daemon.connection
        endpoint = connection["endpoint"]
        assert connection["curve"]["server_key"] == server_key
        with Client(folder) as client:
            assert len(client.complete("x", **PROMPT).ids) == 3
        with Client(endpoint, server_key=server_key, key_file=friend.secret) as client:
            assert len(client.complete("x", **PROMPT).ids) == 3

        async def ask() -> int:
            async with AsyncClient(endpoint, server_key=server_key, key_file=friend.secret) as client:
                return len((await client.complete("x", **PROMPT)).ids)

        assert asyncio.run(ask()) == 3
        with pytest.raises(AccessDeniedError, match="not allowed there"):
            Client(endpoint, server_key=server_key, key_file=stranger.secret)
        with pytest.raises(AccessDeniedError, match="it wants CURVE keys"):
            Client(endpoint)
        with pytest.raises(AccessDeniedError):
            asyncio.run(AsyncClient(endpoint).open())
        with pytest.raises(AccessDeniedError):
            Client(endpoint, server_key=zmq.curve_keypair()[0].decode(), key_file=friend.secret)

        keys = ["--server-key", server_key, "--key-file", str(friend.secret)]
        assert daemon.cli("generate", "x", "--max-new-tokens", "2").returncode == 0
        elsewhere = run_cli(
            "generate", "x", "--max-new-tokens", "2", "--connect", endpoint, *keys, runtime_dir=tmp_path / "none"
        )
        assert elsewhere.returncode == 0, elsewhere.stderr
        status = json.loads(daemon.cli("status", "--json").stdout)
        remote = run_cli(
            "status", "--json", "--connect", status["control_endpoint"], *keys, runtime_dir=tmp_path / "none"
        )
        assert json.loads(remote.stdout)["instance"] == connection["instance"]
        watched = run_cli(
            "top", "--once", "--connect", status["metrics_endpoint"], *keys, runtime_dir=tmp_path / "none"
        )
        assert watched.stdout.startswith("ready"), watched.stderr
        unlisted = ["--server-key", server_key, "--key-file", str(stranger.secret)]
        unseen = run_cli(
            "top", "--once", "--connect", status["metrics_endpoint"], *unlisted, runtime_dir=tmp_path / "none"
        )
        assert unseen.returncode == 4
        denied = run_cli("status", "--connect", status["control_endpoint"], runtime_dir=tmp_path / "none")
        assert denied.returncode == 4
        assert daemon.cli("stop").returncode == 0
        assert daemon.wait_end() == 0
        nothing_left(folder)
