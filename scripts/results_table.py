"""The tables of ``scripts/results/README.md``, and the README's tables of speed, from the files in ``scripts/results/``.

python scripts/results_table.py           # print them
python scripts/results_table.py --write   # put them between their markers
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "scripts" / "results"
BEGIN, END = "<!-- results: scripts/results_table.py --write -->", "<!-- end of results -->"
PAPERS_BEGIN, PAPERS_END = "<!-- papers: scripts/results_table.py --write -->", "<!-- end of papers -->"
GPU_BEGIN, GPU_END = "<!-- gpu: scripts/results_table.py --write -->", "<!-- end of gpu -->"
SPEED_BEGIN, SPEED_END = "<!-- speed: scripts/results_table.py --write -->", "<!-- end of speed -->"


def table() -> str:
    """Measured runs: a row per schedule and file, and what each file was measured with."""
    files = sorted(RESULTS.glob("runtime-*.json"))
    reports = [json.loads(f.read_text(encoding="utf-8")) for f in files]
    lines = [
        "| ranks | schedule | pipelined ÷ strongest unpipelined | predicted ÷ measured | measured ÷ replay "
        "| host µs to run a function: mean, p90 (arrays) | to send, receive | of a GPU at 5 ms | split ÷ fused FLOPs "
        "| bubble predicted, measured |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(report, name, s) for report in reports for name, s in report["schedules"].items()]
    lines += ["", *(_origin(report) for report in reports)]
    lines += [line for report in torch_reports() for line in ("", *torch_table(report))]
    lines += ["", processes(json.loads((RESULTS / "processes.json").read_text(encoding="utf-8")))]
    lines += ["", lowering(json.loads((RESULTS / "lowering.json").read_text(encoding="utf-8")))]
    gpus = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(RESULTS.glob("gpu-*.json"))]
    if gpus:
        lines += ["", gpu_table(gpus)]
    if any(RESULTS.glob("gpu/truth-*.json")):
        lines += ["", truth_table()]
    overlaps = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(RESULTS.glob("overlap-*.json"))]
    lines += [line for report in overlaps for line in ("", *overlap_table(report))]
    compiled = [json.loads(f.read_text(encoding="utf-8")) for f in sorted(RESULTS.glob("*-compile.json"))]
    lines += [line for report in compiled for line in ("", *compiled_table(report))]
    public = json.loads((RESULTS / "plan-public.json").read_text(encoding="utf-8"))
    experts = json.loads((RESULTS / "plan-experts.json").read_text(encoding="utf-8"))
    return "\n".join([*lines, "", *public_table(public), "", *experts_table(experts)])


def torch_table(report: dict[str, Any]) -> list[str]:
    """A step beside PyTorch's pipelining (``bench_torch.py``): a row per order of either side."""
    size, versions = report["sizes"], report["versions"]
    sides = {side: report[side] for side in ("jaxpipe", "torch")}
    batch = f"{size['microbatches']} × {size['microbatch_size']} × {size['seq_len']} tokens"
    lines = [
        f"A step beside PyTorch's on the same two cores, in turn, medians of {report['rounds']} rounds of {report['steps']} "
        f"steps: GPT, d {size['d_model']}, {size['num_layers']} layers, {batch}, AdamW, 2 ranks of one core. "
        f"`XLA_FLAGS={versions['xla_flags']}`; {versions['settings'].split(';')[0]}.",
        "",
        "| | seconds (quartiles) | tokens/s | CPU seconds | predicted ÷ measured | bubble |",
        "|---|---|---|---|---|---|",
    ]
    for side, rows in sides.items():
        for name, s in rows.items():
            is_jaxpipe = side == "jaxpipe"
            cells = [
                f"{side} {name}",
                f"{s['step_s']:.2f} ({s['low_s']:.2f} to {s['high_s']:.2f})",
                f"{s['tokens_per_s']:,.0f}",
                f"{s['cpu_s']:.2f}",
                f"{s['predicted_over_step']:.2f}" if is_jaxpipe else "",
                f"{s['bubble_measured']:.0%}" if is_jaxpipe else "",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    foreign = max(s["foreign_cpu"] for rows in sides.values() for s in rows.values())
    return [
        *lines,
        "",
        f"Other processes used at most {foreign:.0%} of the machine. `{report['command']}`, commit {report['commit']}, "
        f"{report['date']}, {report['machine']}, torch {versions['torch']}, jax {versions['jax']}.",
    ]


def processes(report: dict[str, Any]) -> str:
    """Steps of several processes beside one, and what a message costs the host (``bench_processes.py``)."""
    one, several = (report["host_us"][name] for name in ("in_process", "tagged"))
    low, high = min(report["step_ratios"]), max(report["step_ratios"])
    return (
        f"{report['ranks']} ranks in {report['processes']} processes beside one, on the same cores, in turn: a step takes "
        f"{report['step_ratio']:.2f} times as long ({low:.2f} to {high:.2f}), {report['cpu_ratio']:.2f} times the CPU seconds. "
        f"Host µs of a message between processes: send {several['send']:.0f}, receive {several['receive']:.0f}, until it is "
        f"there {several['arrives']:.0f}; in one process {one['send']:.0f}, {one['receive']:.0f}, {one['arrives']:.0f}. "
        f"`{report['command']}`, commit {report['commit']}, {report['date']}, {report['machine']}; {report['schedule']}, "
        f"m={report['microbatches']}."
    )


def lowering(report: dict[str, Any]) -> str:
    """CPU seconds before programs are linked, with a process a rank (``bench_lowering.py``)."""
    parts = []
    for case in report["cases"]:
        seconds, size = case["cpu_s"], f"{case['schedule']} p={case['ranks']}, m={case['microbatches']}"
        lowered = f", lowered {seconds['own']} (all ranks {seconds['all ranks']})" if "own" in seconds else ""
        parts.append(f"{size}: planned {seconds['planned']} (proof {seconds['prove']}){lowered}")
    return (
        "CPU seconds of one of many processes, a rank each: generated, checked, simulated and proven; lowered, with check and "
        f"proof: {'; '.join(parts)}. `{report['command']}`, commit {report['commit']}, {report['machine']}."
    )


def torch_reports() -> list[dict[str, Any]]:
    """One report per machine that ran ``bench_torch.py``, oldest first."""
    reports = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("torch-p2*.json")]
    return sorted(reports, key=lambda report: (report["date"], report["versions"]["torch"]))


def speed() -> str:
    """The README's table: the best of jaxpipe's four orders ÷ the best of PyTorch's, a row per machine."""
    lines = [
        "A GPT of 10.6M parameters over two ranks on two CPU cores, best of four orders each, jaxpipe ÷ PyTorch:",
        "",
        "| machine, versions | tokens/s ÷ pipelined PyTorch | ÷ unpipelined | CPU seconds ÷ pipelined | ÷ unpipelined |",
        "|---|---|---|---|---|",
    ]
    for report in torch_reports():
        versions, ratios = report["versions"], report["ratios"]
        cells = [
            f"{report['machine']}; torch {versions['torch']}, jax {versions['jax']}, {report['date']}",
            *(
                f"{ratios[f'{figure}_over_torch_{kind}']:.2f}"
                for figure in ("tokens_per_s", "cpu_s")
                for kind in ("pipelined", "unpipelined")
            ),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gpu_summary() -> str:
    """The README's table: one row per device and hidden size of what was measured before ``gpu_truth.py``."""
    lines = [
        "| device, hidden | (F + B + W) ÷ (F + BW) | MFU: functions alone, in a step | step that offloads half, all ÷ none "
        "| compute slower while copying | predicted ÷ measured peak |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("gpu-*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        for size in report["sizes"]:
            functions, steps = size["split"]["functions"], {step["schedule"]: step for step in size["steps"]}
            # PO's rows hold F, B and W of two chunks for each microbatch.
            alone_s = 2 * report["microbatches"] * sum(functions[op]["median_s"] for op in "FBW")
            mfu, peaks = size["split"]["mfu"], [step["predicted_over_measured"] for step in size["steps"]]
            cells = [
                f"{report['device']}, {size['hidden']}",
                f"{size['split']['split_over_fused']:.3f}",
                f"{mfu:.0%}, {mfu * alone_s / steps['po']['step']['median_s']:.0%}",
                ", ".join(f"{steps[name]['step_over_no_offload']:.2f}" for name in ("po-h", "po-f")),
                ", ".join(f"{size['slowdown'][op] - 1:.0%}" for op in "FBW"),
                f"{min(peaks):.2f} to {max(peaks):.2f}",
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def compiled_table(report: dict[str, Any]) -> list[str]:
    """Tabulate what ``compile_h100.py`` read from compiled programs: a row per model and form."""
    size, ops = report["size"], ("F", "B", "W", "BW")
    lines = [
        f"Stages of {size['L']} layers as XLA compiles them for one {report['device']} (hidden {size['D']}, sequence "
        f"{size['T']}, {size['dtype']}, recompute none): MB that F saves for a microbatch, and in how many arrays; MB of "
        "workspace; kernels that only transpose an array of activations, and that transpose one while they compute; products.",
        "",
        "| stage | saved | workspace F, B, W, BW | transposing F, B, W, BW | products F, B, W, BW |",
        "|---|---|---|---|---|",
    ]
    for case in report["cases"]:
        functions = [case["functions"][op] for op in ops]
        cells = [
            f"{case['model']}, {case['form']}",
            f"{case['residual_bytes'] / 1e6:.0f} in {case['residual_arrays']}",
            ", ".join(f"{f['temp_bytes'] / 1e6:.0f}" for f in functions),
            ", ".join(f"{f['transposing']} + {f['fused']}" for f in functions),
            ", ".join(str(f["products"]) for f in functions),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    origin = f"- `{report['command']}`, commit {report['commit']} (before: {report['before_commit']}), {versions}."
    return [*lines, "", origin]


def overlap_table(report: dict[str, Any]) -> list[str]:
    """Tabulate what ``bench_overlap.py`` read from compiled programs: a row per model, a column per program."""
    programs = list(dict.fromkeys((c["program"], c["cublas"]) for c in report["cases"]))
    cells = {(c["variant"], c["program"], c["cublas"]): c for c in report["cases"]}
    size, cp = report["size"], report.get("cp", 1)
    shards = f"tp {report['tp']}, cp {cp}" if "cp" in report else f"{report['tp']} shards, of time for a ring"
    shards = report.get("mesh", shards)
    lines = [
        "Collectives with a matrix product between start and done, in code that XLA scheduled for "
        f"{report['device']} ({shards}; hidden {size['D']}, {size['L']} layers, sequence "
        f"{size['T']}, {size['dtype']}); MB of workspace.",
        "",
        "| stage | " + " | ".join(program + ", cuBLAS" * cublas for program, cublas in programs) + " |",
        "|---" * (len(programs) + 1) + "|",
    ]
    for variant in dict.fromkeys(c["variant"] for c in report["cases"]):
        row = [cells.get((variant, *program)) for program in programs]
        shown = (
            "–" if c is None else f"{c['covered']} of {c['collectives']}, {c['temp_bytes'] / 1e6:.0f} MB" for c in row
        )
        lines.append(f"| {variant} | " + " | ".join(shown) + " |")
    estimated = [c for c in report["cases"] if c.get("xla")]
    if estimated:
        exposed = (
            f"{c['variant']} {c['program']} {c['xla']['exposed_s'] * 1e6:.0f}, {c['ours']['exposed_s'] * 1e6:.0f}"
            for c in estimated
        )
        lines += ["", f"µs in which compute waits for a collective, by XLA's model and by ours: {'; '.join(exposed)}."]
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    return [*lines, "", f"- `{report['command']}`, commit {report['commit']}, {versions}."]


def public_table(report: dict[str, Any]) -> list[str]:
    """Tabulate ``plan`` beside public measurements (``plan_public.py``): what is held out per system, then the pipelines."""
    lines = [
        "`plan` beside what other systems publish of H100s (`scripts/public_measurements.csv`; most of it in FP8): one number "
        "a system is fitted on one row, the part of the bfloat16 peak that products reach.",
        "",
        "| system | rows | part of peak | held out | median error | largest | rank correlation |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {s['system']} | {rows} | {s['part_of_bfloat16_peak']} | {s[rows]['held_out_rows']} | "
        f"{s[rows]['median_error']:.0%} | {s[rows]['largest_error']:.0%} | {s[rows]['rank_correlation']:.2f} |"
        for s in report["systems"]
        for rows in ("all", "pipelines")
        if s[rows]
    ]
    lines += [
        "",
        "| pipeline | GPUs | dp, tp, pp, chunks | measured, a GPU | predicted ÷ measured |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['system']} {r['model']} | {r['gpus']} | {r['dp']}, {r['tp']}, {r['pp']}, {r['vp']} "
        f"| {r['measured']} {r['unit']} | {r['ratio']:.2f}{' (fitted)' if r['note'].startswith('calibration') else ''} |"
        for s in report["systems"]
        for r in s["rows"]
        if r["pp"] > 1 and r["cp"] == 1
    ]
    return [*lines, "", f"- `{report['command']}`, commit {report['commit']}."]


def experts_table(report: dict[str, Any]) -> list[str]:
    """Tabulate mixtures of experts (``plan_experts.py``): sizes beside published ones, exchanges beside recorded ones."""
    run, *exchanges = report["recorded"]
    plan = report["planned_run"]
    return [
        "Mixtures of experts, counted by hand: parameters beside published ones; a layer's F and its exchanges (dispatch and "
        "combine) for 4,096 tokens on an H100, EP 8 in a node.",
        "",
        "| model | parameters, active (10⁹) | ÷ published | F, ms | exchanges, ms | ÷ F | rows received: mean, worst |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {r['model']} | {r['parameters'] / 1e9:.2f}, {r['active_parameters'] / 1e9:.2f} | {r['ratio']:.4f}, "
            f"{r['active_ratio']:.4f} | {r['forward_ms']:.2f} | {r['exchange_ms']:.2f} | {r['exchange_share']:.2f} | "
            f"{r['mean_rows']:,}, {r['worst_rows']['8']:,} |"
            for r in report["sizes"]
        ),
        "",
        "The same by `jaxpipe plan` of `scripts/plans/` on H100s (DeepSeek-V3 with grouped queries in place of MLA):",
        "",
        "| model | parameters, active (10⁹) | exchanges at EP 8, ms (÷ by hand) | GPUs, schedule | step | MFU | GB a GPU "
        "| worst buffer |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {r['model']} | {r['parameters'] / 1e9:.2f}, {r['active_parameters'] / 1e9:.2f} | {r['exchange_ms']:.2f} "
            f"({r['exchange_ms'] / by_hand['exchange_ms']:.2f}) | {r['devices']}, {r['schedule']} | {r['step_s']} s | "
            f"{r['mfu']:.1%} | {r['peak_gb']} | {r['worst_gb']} GB |"
            for r, by_hand in zip(report["plans"], report["sizes"], strict=True)
        ),
        "",
        "| recorded exchanges of a step | balanced, ms | by arithmetic (÷ recorded) | real routing, ms (÷ balanced) |",
        "|---|---|---|---|",
        *(
            f"| {r['run']} | {r['balanced_ms']:,} | {r['ours_ms']:,} ({r['ratio']:.2f}) | {r['real_ms']:,} "
            f"({r['imbalance']:.2f}) |"
            for r in exchanges
        ),
        "",
        f"{run['run']}: a step of {run['step_s']} s became {run['step_with_hiding_s']} s with hidden exchanges "
        f"(Megatron-Bridge). By arithmetic its exchanges take {run['exchange_s']} s and its products "
        f"{run['compute_s_at_half_peak']} s at half the peak: {run['hidden_share']:.0%} of the exchanges were hidden. "
        f"`plan` has {plan['plan_step_s']} s, and {plan['plan_step_with_hiding_s']} s with `combined-1f1b`.",
        "",
        f"- `{report['command']}`, commit {report['commit']}.",
    ]


def truth_table() -> str:
    """Tabulate what ``gpu_truth.py`` measured: a row per check of each experiment and card."""
    lines = ["| card | question | number | value | wanted | so? |", "|---|---|---|---|---|---|"]
    origins: dict[str, set[str]] = {}
    composed: list[str] = []
    for file in sorted(RESULTS.glob("gpu/truth-*.json")):
        for result in json.loads(file.read_text(encoding="utf-8")):
            head = f"| {result['card']} | {result['id']}: {result['question']} |"
            if result["status"] != "done":
                lines.append(f"{head} {result['status']}: {result['note']} | – | – | – |")
            elif not result["checks"]:
                lines.append(f"{head} measured, nothing wanted | – | – | – |")
            for check in result.get("checks", ()):
                value, holds = check["value"], {True: "yes", False: "no", None: "–"}[check["ok"]]
                shown = f"{value:.4g}" if isinstance(value, (int, float)) else value or "–"
                lines.append(f"{head} {check['name']} | {shown} | {check['want']} | {holds} |")
            origin = f"{result['card']}: jax {result['versions'].get('jax')}, {result['versions'].get('platform')}"
            origins.setdefault(origin, set()).add(f"{result['id']} at {result['commit']}")
            if result["id"] == "T18" and result["status"] == "done":
                composed += _composed_rows(result["card"], result["numbers"])
    lines += ["", *composed] if composed else []
    return "\n".join([*lines, "", *(f"- {origin}; {', '.join(sorted(ids))}." for origin, ids in origins.items())])


def _composed_rows(card: str, numbers: dict[str, Any]) -> list[str]:
    """Tabulate predictions of many GPUs from ranks rehearsed on one, beside what others have measured on theirs."""
    lines = [
        f"Predicted for many {card} from ranks rehearsed on one, attention counted whole and thrice:",
        "",
        "| layout | tokens/s a GPU | TFLOP/s a GPU | bubble |",
        "|---|---|---|---|",
    ]
    for name, row in numbers.items():
        rates = f"{row['tokens_per_s_per_gpu']:.0f} | {row['flops_per_s_per_gpu'] / 1e12:.0f}"
        lines.append(
            f"| measured: {row['what']} | {rates} | – |"
            if name == "peer"
            else f"| {name}, {row['schedule']}, recompute {row['recompute']} | {rates} | {row['bubble']:.1%} |"
        )
    return [*lines, ""]


def gpu_table(reports: list[dict[str, Any]]) -> str:
    """Tabulate what was measured before ``gpu_truth.py``: a row per device and hidden size, then one per program."""
    lines = [
        "| device | hidden | (F + B + W) ÷ (F + BW) | MFU F, B, W | out, in GB/s (of the link) | compute while copying "
        "| k measured, formula, with own bytes |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [_gpu_row(r, s) for r in reports for s in r["sizes"]]
    lines += [
        "",
        "| device | hidden | schedule | step ms | ÷ no offload | host µs per instruction | predicted ÷ measured peak "
        "| copies under compute |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_gpu_step(r, s, x) for r in reports for s in r["sizes"] for x in s["steps"]]
    lines += [
        "",
        *(
            f"- {r['device']}: `{r['command']}`, commit {r['commit']}, {r['date']}, jax {r['versions']['jax']}, "
            f"{r['versions']['platform']}; sequence {r['sequence']}, {r['dtype']}, recompute {r['recompute']}, one rank of "
            f"{r['ranks']}, m={r['microbatches']}."
            for r in reports
        ),
    ]
    return "\n".join(lines)


def _gpu_row(report: dict[str, Any], size: dict[str, Any]) -> str:
    functions, copies = size["split"]["functions"], report["copies"]
    mfu = [functions[op]["mfu"] for op in "FBW"]
    link = "–"
    if copies is not None:
        shares = [copies.get(f"{way}_share_of_link") for way in ("d2h", "h2d")]
        rates = [f"{copies[way]['bytes_per_s'] / 1e9:.1f}" for way in ("d2h", "h2d")]
        link = ", ".join(x if s is None else f"{x} ({s:.0%})" for x, s in zip(rates, shares, strict=True))
    k = size.get("k")
    cells = [
        report["device"],
        str(size["hidden"]),
        f"{size['split']['split_over_fused']:.3f}",
        ", ".join("–" if x is None else f"{x:.0%}" for x in mfu),
        link,
        ", ".join(f"{size['slowdown'][op]:.3f}" for op in "FBW") if "slowdown" in size else "–",
        f"{k['measured']:.2f}, {k['formula']:.2f}, {k['formula_own_bytes']:.2f}" if k else "–",
    ]
    return "| " + " | ".join(cells) + " |"


def _gpu_step(report: dict[str, Any], size: dict[str, Any], step: dict[str, Any]) -> str:
    hidden = ", ".join(f"{c['hidden']:.0%}" for c in step["copies"]) or "–"
    cells = [
        report["device"],
        str(size["hidden"]),
        step["schedule"],
        f"{step['step']['median_s'] * 1e3:.1f}",
        f"{step['step_over_no_offload']:.3f}",
        f"{step['host_us']:.0f}",
        ("" if step["peak_is_exact"] else "at most ") + f"{step['predicted_over_measured']:.3f}",
        hidden,
    ]
    return "| " + " | ".join(cells) + " |"


def _row(report: dict[str, Any], name: str, s: dict[str, Any]) -> str:
    host = s["host_us"]
    layers = f" ({s['num_layers']} blocks)" if s.get("num_layers", 0) > report["model"]["num_layers"] else ""
    cells = [
        str(report["ranks"]),
        name + layers,
        f"{s['pipelined_over_strongest']:.2f}",
        f"{s['predicted_over_measured']:.2f}",
        f"{s['measured_over_replay']:.3f}",
        f"{host['run_mean']:.0f}, {host['run_p90']:.0f} ({host['arrays']:.0f})",
        f"{host['send']:.0f}, {host['recv']:.0f}",
        f"{host['of_5_ms']:.0%}",
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


def papers() -> str:
    """All families beside each other, and the papers' tables beside ours."""
    report = json.loads((RESULTS / "paper-tables.json").read_text(encoding="utf-8"))
    return f"{solved()}\n\n{compared()}\n\n{paper_tables(report)}"


def solved() -> str:
    """Tabulate what ``bench_solve.py`` measured: the best family, the solver, the proven bound."""
    lines = [
        "`jaxpipe solve` against the best family of its placement (longest rank span; one chunk: one-to-one, two: V; costs of "
        "the 9.6B model are Table 5's of `controllable-memory.txt`). Seconds: first answer, last improvement, end.",
        "",
        "| p, m | chunks | costs | k | limit | family | solver | bound | gap | seconds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    origins = []
    for file in sorted(RESULTS.glob("solve-*.json")):
        report = json.loads(file.read_text(encoding="utf-8"))
        lines += [_solved_row(case) for case in report["cases"]]
        origins.append(
            f"`{report['command']}`: commit {report['commit']}, OR-Tools {report['ortools']}, Python {report['python']}, "
            f"{report['cores']} shared cores."
        )
    return "\n".join([*lines, "", *origins])


def _solved_row(case: dict[str, Any]) -> str:
    costs = "unit" if case["costs"] == "unit" else "9.6B"
    family = "–" if case["family_value"] is None else f"{case['family_value']:.6g}"
    cells = [
        f"{case['p']}, {case['m']}",
        str(case["v"]),
        costs,
        f"{case['k']:g}",
        f"{case['limit'] * case['p']:g}",
        family,
        f"{case['value']:.6g}",
        f"{case['lower_bound']:.6g}",
        f"{case['gap']:.1%}" if case["gap"] > 1e-9 else "0",
        f"{case['first_s']:.2f}, {case['last_s']:.1f}, {case['wall_s']:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def paper_tables(report: dict[str, Any]) -> str:
    """Return the tables of ``paper_tables.py``, paper → ours, compact."""
    tables = report["tables"]
    origin = f"`{report['command']}`, commit {report['commit']}, {report['date']}; simulated, no hardware involved."
    later = {(o["command"], o["commit"], o["date"]) for o in report.get("again", {}).values()}
    origin += "".join(f" Since then `{command}`, commit {commit}, {date}." for command, commit, date in sorted(later))
    return "\n".join(
        [
            *_table_4(tables["controllable-memory table 4"]),
            *_beside("`controllable-memory.txt` table 1", "chunk F = B = W = 1; peak ÷ 1F1B's; bubble ÷ p",
                     tables["controllable-memory table 1"]),
            *_figure("`controllable-memory.txt` figure 9: bubble % of `v-adaptive`, m = 2p, by memory limit ÷ 1F1B's",
                     "limit", tables["controllable-memory figure 9"]),
            *_beside("`pipeoffload.txt` table 1", "chunk units, v = 2, round trip half of F + B + W; formula → simulated",
                     tables["pipeoffload table 1"]),
            *_figure("`pipeoffload.txt` figure 3: peak ÷ peak without offload of `po`, p = 8, by part offloaded "
                     "(formula for v → ∞: (1 − x)²)", "offloaded", tables["pipeoffload figure 3"]),
            *_stp_1(tables["stp table 1"]),
            *_stp_6(tables["stp tables 5 and 6"]),
            *_stp_10(tables["stp table 10"]),
            *_optpipe(tables["optpipe table 1"]),
            *_hidden(tables["hidden exchanges"], tables["hidden exchanges, recorded"][0]),
            origin,
        ]
    )  # fmt: skip


def _table_4(rows: list[dict[str, Any]]) -> list[str]:
    cells = [c for row in rows for c in row["cells"] if c["difference"] is not None]
    worst = max(c["difference"] for c in cells)
    better = sum(c["difference"] <= 0 for c in cells)
    width = max(len(row["cells"]) for row in rows)
    lines = [
        "`controllable-memory.txt` table 4, bubble % by longest span, paper → ours: "
        f"{better} of {len(cells)} cells no worse, the worst {worst:+.2f} points.",
        "",
        "| schedule | model (p) | " + " | ".join(f"m = {2**k if k else ''}p" for k in range(width)) + " |",
        "|---" * (width + 2) + "|",
    ]
    for row in rows:
        shown = [f"{_number(c['paper'])} → {_number(c['ours'])}" for c in row["cells"]]
        lines.append(f"| {row['family']} | {row['model']} ({row['ranks']}) | " + " | ".join(shown) + " |")
    return [*lines, ""]


def _beside(title: str, note: str, rows: list[dict[str, Any]]) -> list[str]:
    """Rows with a peak and a bubble, each beside the paper's."""
    lines = [f"{title} ({note}).", "", "| schedule | p, m | peak | bubble |", "|---|---|---|---|"]
    for row in rows:
        costs = ", F B W T_AR " + " ".join(f"{x:g}" for x in row["costs"]) if "costs" in row else ""
        both = (f"{_number(row[k]['paper'])} → {_number(row[k]['ours'])}" for k in ("peak", "bubble"))
        lines.append(f"| {row['family']} | {row['ranks']}, {row['microbatches']}{costs} | " + " | ".join(both) + " |")
    return [*lines, ""]


def _figure(title: str, x: str, rows: list[dict[str, Any]]) -> list[str]:
    """Curves, a row each."""
    at = [point[x] for point in rows[0]["points"]]
    lines = [f"{title}.", "", "| | " + " | ".join(_number(a) for a in at) + " |", "|---" * (len(at) + 1) + "|"]
    for row in rows:
        label = f"p = {row['ranks']} ({row['model']})" if "model" in row else f"v = {row['chunks']}"
        lines.append(f"| {label} | " + " | ".join(_number(point["ours"]) for point in row["points"]) + " |")
    if "formula" in rows[0]["points"][0]:
        lines.append("| formula | " + " | ".join(_number(point["formula"]) for point in rows[0]["points"]) + " |")
    return [*lines, ""]


def _hidden(rows: list[dict[str, Any]], recorded: dict[str, Any]) -> list[str]:
    """Orders with collectives, a row a family and a column for sizes and costs."""
    columns = [f"p {r['ranks']}, m {r['microbatches']}, {r['comm']:g}" for r in rows]
    paper, ours = recorded["gain"]["paper"], recorded["gain"]["ours"]
    lines = [
        "Collectives of experts (or tp) under braids: F = B = W = 1 a rank's share, collectives of F and of B as long as the "
        "column says, eight a stage. Makespan (gain over 1F1B, peak activations).",
        "",
        "| schedule | " + " | ".join(columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for same in zip(*(r["cells"] for r in rows), strict=True):
        first = same[0]
        chunks = f", v {first['chunks']}" if first["family"] in ("interleaved-1f1b", "combined-1f1b") else ""
        label = f"{first['family']}{chunks}{', pass braid' * first['braid']}"
        shown = (f"{c['makespan']:.1f} ({c['gain']:.2f}×, {c['peak']:g})" for c in same)
        lines.append(f"| {label} | " + " | ".join(shown) + " |")
    return [
        *lines,
        "",
        f"Recorded by Megatron-Bridge (Qwen3-30B-A3B, 16 H100, EP 16, no pipeline): 41.25 → 31.31 s, {paper:.2f}×; ours with "
        f"exchanges of {recorded['comm']:.2f} F (EP 8 in a node, by arithmetic) over F, B, W that hide nothing: {ours:.2f}×.",
        "",
    ]


def _stp_1(rows: list[dict[str, Any]]) -> list[str]:
    """Both bubbles and the peak, the formulas' beside the simulator's."""
    lines = [
        "`stp.txt` table 1 (chunk units, m = 4p, four layers a chunk, PP bubble by longest span; formula → simulated).",
        "",
        "| schedule | p, F B W T_AR | PP bubble | TP bubble | peak |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        costs = " ".join(f"{x:g}" for x in row["costs"])
        cells = [f"{_number(row[k]['paper'])} → {_number(row[k]['ours'])}" for k in ("bubble", "tp_bubble", "peak")]
        lines.append(f"| {row['family']} | {row['ranks']}, {costs} | {' | '.join(cells)} |")
    return [*lines, ""]


def _stp_6(rows: list[dict[str, Any]]) -> list[str]:
    """STP's gain over 1F1B-I and ZB-V, and peak memory, the paper's beside the simulator's: ``stp``, ``stp-published``."""
    off = [abs(x["difference"]) for row in rows if row["tp"] == 8 for x in (*row["gain"], *row["gain_published"])]
    lines = [
        "`stp.txt` tables 5 and 6: STP's throughput gain in % and peak GB, paper → simulated `stp`, `stp-published`, with one "
        "GEMM efficiency and one link rate for all cells (`scripts/paper_stp.py` lists the assumptions). "
        f"At TP 8 no gain is off by more than {max(off):.1f} points.",
        "",
        "| model, sequence | TP, PP | m | over 1F1B-I | over ZB-V | GB of 1F1B-I, ZB-V, STP |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        both = zip(row["gain"], row["gain_published"], strict=True)
        gains = [f"{x['paper']:.1f} → {x['ours']:.1f}, {y['ours']:.1f}" for x, y in both]
        *rest, published = row["memory_gb"]
        memory = ", ".join(f"{x['paper']} → {x['ours']:.0f}" for x in rest) + f", {published['ours']:.0f}"
        where = f"| {row['model']}, {row['sequence']} | {row['tp']}, {row['ranks']} | {row['microbatches']} |"
        lines.append(f"{where} {' | '.join(gains)} | {memory} |")
    return [*lines, ""]


def _stp_10(rows: list[dict[str, Any]]) -> list[str]:
    """STP's gain over 1F1B-I and ZB-V with context or data parallelism."""
    lines = [
        "`stp.txt` table 10 (12.1B, TP 2, PP 4): STP's throughput gain in %, paper → simulated `stp`, as above.",
        "",
        "| sequence | CP | DP | m | over 1F1B-I | over ZB-V |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        gains = " | ".join(f"{x['paper']:.1f} → {x['ours']:.1f}" for x in row["gain"])
        lines.append(f"| {row['sequence']} | {row['cp']} | {row['dp']} | {row['microbatches']} | {gains} |")
    return [*lines, ""]


def _optpipe(rows: list[dict[str, Any]]) -> list[str]:
    """Makespans ÷ work by memory limit; a dash where a method does not fit."""
    names = [key for key in rows[0] if key not in ("ranks", "microbatches", "limit", "solver", "bound")]
    lines = [
        "`optpipe.txt` table 1 on simulated costs: makespan ÷ work (9.6B model, transfers 0.05 F, k = 1, one shared host "
        "lane); – where a method does not fit into the limit. `solve` searches one chunk and V for 30 s.",
        "",
        "| p, m | limit | " + " | ".join(names) + " | `solve` | bound | shorter than po-f |",
        "|---" * (len(names) + 5) + "|",
    ]
    for row in rows:
        cells = [_number(row[name]) for name in names]
        gain = f"{1 - row['solver'] / row['po-f']:.0%}" if row.get("po-f") else "–"
        lines.append(
            f"| {row['ranks']}, {row['microbatches']} | {row['limit']:g}p | {' | '.join(cells)} | "
            f"{_number(row['solver'])} | {_number(row['bound'])} | {gain} |"
        )
    return [*lines, ""]


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.3g}" if abs(x) < 100 else f"{x:.0f}"


def compared() -> str:
    """Return the saved output of ``jaxpipe compare``, the command in its first line."""
    command, _, text = (RESULTS / "compare.txt").read_text(encoding="utf-8").partition("\n")
    return f"All families beside each other (`{command}`; equal stages, no transfer time):\n\n```\n{text.rstrip()}\n```"


def written() -> dict[Path, list[tuple[str, str, str]]]:
    """Return, by file, the markers (begin, end) and the text between them."""
    return {
        ROOT / "README.md": [(SPEED_BEGIN, SPEED_END, speed()), (GPU_BEGIN, GPU_END, gpu_summary())],
        RESULTS / "README.md": [(BEGIN, END, table()), (PAPERS_BEGIN, PAPERS_END, papers())],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put them between their markers")
    if not parser.parse_args().write:
        print(f"{speed()}\n\n{gpu_summary()}\n\n{table()}\n\n{papers()}")
        return 0
    for page, parts in written().items():
        text = page.read_text(encoding="utf-8")
        for begin, end, content in parts:
            head, _, rest = text.partition(begin)
            _, _, tail = rest.partition(end)
            text = f"{head}{begin}\n{content}\n{end}{tail}"
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
