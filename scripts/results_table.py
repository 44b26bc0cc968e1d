"""The README's results table, from the JSON files in ``scripts/results/``.

python scripts/results_table.py           # print it
python scripts/results_table.py --write   # put it into README.md between its markers
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: scripts/results_table.py --write -->", "<!-- end of results -->"


def table() -> str:
    """Markdown: a row per schedule and file, and what each file was measured with."""
    files = sorted((ROOT / "scripts" / "results").glob("runtime-*.json"))
    reports = [json.loads(f.read_text(encoding="utf-8")) for f in files]
    lines = [
        "| ranks | schedule | pipelined ÷ one jitted step | ÷ jitted microbatches | measured ÷ replay "
        "| host µs per instruction (run, send, recv) | split ÷ fused FLOPs | bubble predicted, measured |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(report, name, s) for report in reports for name, s in report["schedules"].items()]
    lines += ["", *(_origin(report) for report in reports)]
    return "\n".join(lines)


def _row(report: dict[str, Any], name: str, s: dict[str, Any]) -> str:
    host = s["host_us"]
    layers = f" ({s['num_layers']} blocks)" if s.get("num_layers", 0) > report["model"]["num_layers"] else ""
    cells = [
        str(report["ranks"]),
        name + layers,
        f"{s['pipelined_over_unpipelined']:.2f}",
        f"{s['pipelined_over_one_by_one']:.2f}",
        f"{s['measured_over_replay']:.3f}",
        f"{host['median']:.0f} ({host['run']:.0f}, {host['send']:.0f}, {host['recv']:.0f})",
        f"{s['split_over_fused_flops']:.3f}",
        f"{s['bubble_predicted']:.0%}, {s['bubble_measured']:.0%}",
    ]
    return "| " + " | ".join(cells) + " |"


def _origin(report: dict[str, Any]) -> str:
    model = ", ".join(f"{k} {v}" for k, v in report["model"].items())
    return (
        f"- p={report['ranks']}: `{report['command']}`, commit {report['commit']}, {report['date']}, {report['machine']}, "
        f"jax {report['versions']['jax']}, Python {report['versions']['python']}; m={report['microbatches']}, microbatch "
        f"{report['microbatch_size']}, recompute {report['recompute']}; {model}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    if not parser.parse_args().write:
        print(table())
        return 0
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    readme.write_text(f"{head}{BEGIN}\n{table()}\n{END}{tail}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
