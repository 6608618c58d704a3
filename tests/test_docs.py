"""What the documentation says of the code is true."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

from deepinfer.daemon.metrics import SWAP_NAMES

ROOT = Path(__file__).parent.parent


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_module_table_of_the_architecture_page_is_current():
    """Write it anew with: python docs/modules.py"""
    assert load(ROOT / "docs" / "modules.py").table() in (ROOT / "docs" / "architecture.md").read_text()


def test_every_file_that_the_documentation_names_exists():
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    for page in pages:
        for name in re.findall(
            r"`((?:daemon|stages|kernels|clients|tests|docs)/[\w/.]+\.(?:py|md|json|sh))`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
        for link in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_setting_is_read_somewhere():
    from dataclasses import fields

    from deepinfer.daemon.config import DaemonConfig

    files = [*(ROOT / "daemon").glob("*.py"), *(ROOT / "stages").glob("*.py")]
    code = "".join(path.read_text() for path in files if path.name != "config.py")
    for field in fields(DaemonConfig):
        assert re.search(rf"\.{field.name}\b", code), f"nothing reads {field.name}"


def test_the_operations_page_names_the_settings_that_reload_takes_over():
    from dataclasses import fields

    from deepinfer.daemon.config import DaemonConfig

    page = (ROOT / "docs" / "operations.md").read_text()
    named = page.split("<!-- live settings -->")[1].split("<!-- end of live settings -->")[0]
    live = {field.name for field in fields(DaemonConfig) if field.metadata["live"]}
    assert set(re.findall(r"`(\w+)`", named)) == live


def test_the_unit_of_the_operations_page_fits_the_daemon():
    import configparser

    from click.testing import CliRunner

    from deepinfer.daemon.cli import main
    from deepinfer.daemon.config import DaemonConfig
    from deepinfer.daemon.stopping import CUT_SECONDS, EXIT_CONFIG

    page = (ROOT / "docs" / "operations.md").read_text()
    unit = configparser.ConfigParser()
    unit.read_string(page.split("```ini\n")[1].split("```")[0])
    service = unit["Service"]
    _, command, *arguments = service["ExecStart"].split()
    shown = CliRunner().invoke(main, ["config", "show", *arguments])
    assert (command, shown.exit_code) == ("start", 0), shown.output
    defaults = DaemonConfig()
    assert int(service["TimeoutStartSec"]) >= defaults.start_timeout_s
    assert int(service["TimeoutStopSec"]) > defaults.drain_s + CUT_SECONDS
    assert int(service["WatchdogSec"]) > defaults.hang_timeout_s
    assert int(service["RestartPreventExitStatus"]) == EXIT_CONFIG


FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "recv_serialized"}


def data_that_could_run(source: str) -> list[str]:
    """Where a Python source turns data into code or into objects of any type."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names if name.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in FORBIDDEN_MODULES else []
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            allows = any(word.arg == "allow_pickle" for word in node.keywords)
            if name in FORBIDDEN_CALLS or name == "torch.load" or name.split(".")[-1] in FORBIDDEN_METHODS or allows:
                found.append(name)
    return found


def test_nothing_is_unpickled_or_evaluated_and_no_weights_are_loaded_with_torch_load():
    for folder in ("daemon", "stages", "kernels", "clients", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not data_that_could_run(path.read_text()), path


def test_the_search_for_code_in_data_finds_it():
    """The control arm of the test above."""
    for source in (
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load(path)",
        "eval(text)",
        "socket.recv_pyobj()",
        "numpy.load(path, allow_pickle=True)",
    ):
        assert data_that_could_run(source), source
    assert not data_that_could_run("model.eval()\nre.compile(x)\njson.load(file)")


def test_the_table_of_metrics_is_that_of_the_registry_and_names_in_the_text_are_real():
    """Write it anew with: python docs/modules.py"""
    page, written = (ROOT / "docs" / "metrics.md").read_text(), load(ROOT / "docs" / "metrics_table.py")
    assert written.table() in page
    names = {written.name_of(family) for family in written.specimen().registry.collect()}
    as_vllm = page.partition("`vllm:`: ")[2].partition("All others are ours")[0]
    told = {f"deepinfer_{name}" for name in re.findall(r"`(\w+)`", as_vllm)}
    assert len(told) > 15
    assert told <= names
    assert set(re.findall(r"`(deepinfer_\w+)`", page)) == names - SWAP_NAMES


def test_every_metric_of_the_dashboard_exists():
    board = json.loads((ROOT / "docs" / "grafana-dashboard.json").read_text())
    families = load(ROOT / "docs" / "metrics_table.py").specimen().registry.collect()
    samples = {sample.name for family in families for sample in family.samples}
    words = {"rate", "sum", "by", "le", "histogram_quantile"}
    shown = set()
    for target in (target for panel in board["panels"] for target in panel["targets"]):
        expression = target["expr"].replace("[$__rate_interval]", "")
        shown |= set(re.findall(r"[a-z][a-z_0-9]+", expression)) - words
    assert shown - samples == set()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert SWAP_NAMES - shown <= {
        "kv_cpu_offload_blocks_total",
        "kv_cpu_reload_blocks_total",
        "cpu_offload_enabled",
    }
