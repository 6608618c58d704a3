"""What the documentation says of the code is true."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

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

    code = "".join(path.read_text() for path in (ROOT / "daemon").glob("*.py") if path.name != "config.py")
    for field in fields(DaemonConfig):
        assert re.search(rf"\.{field.name}\b", code), f"nothing reads {field.name}"


def test_nothing_is_unpickled_and_no_weights_are_loaded_with_torch_load():
    for folder in ("daemon", "stages", "kernels", "clients"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"pickle\.loads?|recv_pyobj|send_pyobj|torch\.load\(", path.read_text()), path
