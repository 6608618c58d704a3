"""The example for Node, against a real daemon."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from example_contract import Example, ExampleContract

from deepinfer.clients import Client

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "clients" / "examples" / "node"
NO_NETWORK = r"code (ENOTFOUND|EAI_AGAIN|ECONN\w+|ENET\w+|EHOSTUNREACH|ETIMEDOUT|ERR_SOCKET_TIMEOUT|E40[37]|E5\d\d)"


def packages() -> Path:
    """A folder with the packages of the lock file, installed once."""
    lock = (SOURCE / "package-lock.json").read_bytes()
    folder = ROOT / "build" / "node" / hashlib.sha256(lock).hexdigest()[:16]
    if not folder.exists():
        fresh = folder.with_name(f"{folder.name}-{os.getpid()}")
        shutil.copytree(SOURCE, fresh, ignore=shutil.ignore_patterns("node_modules", "*.mjs"))
        command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
        installed = subprocess.run(command, cwd=fresh, capture_output=True, text=True, timeout=200)
        if installed.returncode != 0:
            shutil.rmtree(fresh)
            if offline := re.search(NO_NETWORK, installed.stderr):
                pytest.skip(f"the npm packages cannot be fetched: {offline[1]}")
            raise AssertionError(installed.stderr)
        try:
            fresh.rename(folder)
        except OSError:  # Another run was faster.
            shutil.rmtree(fresh)
    return folder


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Example:
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True).stdout
    if int(re.match(r"v(\d+)", version)[1]) < 20:
        pytest.skip(f"the example needs Node 20, this is {version.strip()}")
    # Node looks for packages beside the modules that import them.
    folder = tmp_path_factory.mktemp("node")
    (folder / "node_modules").symlink_to(packages() / "node_modules")
    for module in SOURCE.glob("*.mjs"):
        shutil.copy(module, folder)
    shutil.copy(SOURCE / "package.json", folder)
    return Example(["node", str(folder / "main.mjs")], ["node", str(folder / "metrics_subscriber.mjs")])


class TestNodeExample(ExampleContract):
    pass


REQUESTS_AT_ONCE = """
import { connect } from './deepinfer.mjs'
const client = await connect()
const text = async (prompt) => {
  let joined = ''
  for await (const event of client.generate({ prompt, max_new_tokens: 30 })) joined += event.text ?? ''
  return joined
}
for await (const event of client.generate({ prompt: 'left', max_new_tokens: 8000 })) if (event.event === 'token') break
const [phase, ...texts] = await Promise.all([client.request('ping'), ...['x', 'yy', 'zzz'].map(text)])
const cancelled = async () => (await client.request('metrics')).deepinfer_request_success_total.cancelled ?? 0
while ((await cancelled()) <= Number(process.argv[2])) await new Promise((resolve) => setTimeout(resolve, 20))
console.log(JSON.stringify({ phase, texts }))
client.close()
"""


def test_one_node_client_has_many_requests_open_and_a_loop_that_is_left_cancels(example, endless_daemon):
    with Client(endless_daemon.folder) as client:
        expected = [client.complete(prompt, max_new_tokens=30).text for prompt in ("x", "yy", "zzz")]
        cancelled_before = client.metrics()["deepinfer_request_success_total"].get("cancelled", 0)
    script = Path(example.client[1]).with_name("many.mjs")
    script.write_text(REQUESTS_AT_ONCE)
    ran = Example(["node", str(script)], []).run(endless_daemon.folder, str(cancelled_before))
    assert ran.stderr == ""
    assert json.loads(ran.stdout) == {"phase": {"phase": "ready"}, "texts": expected}
