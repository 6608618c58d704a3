"""Writes the module table of docs/architecture.md from the first line of every module's docstring.

Run as a program it also writes the table of docs/metrics.md.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = (
    "daemon",
    "daemon/bench",
    "daemon/bench/peers",
    "daemon/bench/profile",
    "daemon/quality",
    "daemon/quantize",
    "daemon/stress",
    "stages",
    "stages/memory",
    "stages/model",
    "stages/model/families",
    "stages/text",
    "kernels",
    "kernels/cpu",
    "kernels/cuda",
    "clients",
)


def first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split())


def table() -> str:
    rows = ["| module | what it does |", "|---|---|"]
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            if path.name != "__init__.py":
                rows.append(f"| `{path.relative_to(ROOT)}` | {first_sentence(path).replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


if __name__ == "__main__":
    page = ROOT / "docs" / "architecture.md"
    before, _, rest = page.read_text().partition("## Modules\n")
    _, _, after = rest.partition("\n## Where we left the design")
    page.write_text(f"{before}## Modules\n\n{table()}\n\n## Where we left the design{after}")

    import metrics_table

    metrics_table.write()
