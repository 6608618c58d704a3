"""Writes the table of measurements in README.md from a result file of `bench serving`."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "docs" / "results" / "bench-serving-amx-2-cores.json"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"


def table(report: dict) -> str:
    rates, ratios = report["tokens_per_s"], report["ratios"]
    where = f"{report['machine']['cpu']}, {report['threads']} threads"
    lines = [
        f"{where}; SmolLM2-135M-Instruct Q4_1 (4-bit weights, 8-bit head, bf16 compute); prompts of 64 random tokens;",
        f"medians of {report['rounds']} rounds, {report['date']}. The command is `{report['command']}`;",
        f"the raw numbers are in [docs/results]({RESULT.relative_to(ROOT)}).",
        "",
        "| what | tokens/s |",
        "|---|---|",
    ]
    lines += [f"| {name} | {rate:,.0f} |" for name, rate in rates.items()]
    lines += ["", "| ratio | median | least | most |", "|---|---|---|---|"]
    lines += [f"| {name} | {r['median']:.2f} | {r['min']:.2f} | {r['max']:.2f} |" for name, r in ratios.items()]
    gigabytes = rates["decode c=1"] * report["engine"]["step_weight_bytes"] / 1e9
    lines += ["", f"At c=1 that is {gigabytes:.1f} GB/s of weights. Ready after {report['ready_seconds']} s."]
    return "\n".join(lines)


if __name__ == "__main__":
    page = ROOT / "README.md"
    before, _, rest = page.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{table(json.loads(RESULT.read_text()))}\n{END}{after}")
