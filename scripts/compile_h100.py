"""Compile a stage for a GPU that is not there and report what XLA makes of it: bytes, matrix products, copies that transpose.

A middle stage of four blocks of GPT and of Llama (hidden 4096, sequence 2048, microbatch 1, bfloat16 with float32 gradients) is
built by the pipeline's own code, and its F, B, W and BW are compiled for one H100. Four forms: ``xla`` and ``cudnn``, by the
attention's kernel; ``as written``, xla with weight gradients left as products over batch and time (``jaxpipe/stage/jaxprs.py``
makes matrices of them); and with ``--before DIR``, a checkout of an older commit, ``before``. Per function:

* ``temp_bytes``, ``argument_bytes``, ``output_bytes``: XLA's buffer assignment (cuDNN asks for workspace of its own when its
  plans are made, on a GPU, which is not in it). ``residual_bytes``, ``residual_arrays``: what F
  saves for one microbatch (per stage; what enters the stage is counted where the backward pass reads it).
* ``products``: calls of cuBLAS, of cuDNN's attention, and Triton's products. ``flops``: of the jaxpr's products and kernels.
* ``copies``, ``transposing``: kernels that write an array of at least batch x time x hidden elements and only move data:
  those that keep the order of the axes in memory, and those that change it. ``fused``: kernels that transpose such an array
  while they compute something else. Axes of length 1 have no order.
* ``added``: kernels that add float32 arrays of a million elements or more, such as weight gradients to their accumulators
  where the product does not.
* ``launched``, ``moved_bytes``: kernels and library calls, and the bytes that they read and write.
* ``kernels``: names of custom calls, and how many of each.

Nothing runs: these are programs, not times. Autotuning is off, since it would have to run kernels; products are cuBLAS's
(``--triton``: XLA's own), where a run on a GPU chooses between the two. Needs the wheels jax-cuda12-plugin, jax-cuda12-pjrt and
nvidia-cuda-nvcc-cu12, for cuDNN's form nvidia-cudnn-cu12 too, no GPU and no driver. ``--tiny`` runs it at toy sizes for this
machine's CPU.

``--pairs`` asks instead whether W of two microbatches should be one product, and adds seconds by the roofline of ``jaxpipe
plan`` to: ``W``; ``W, W``, one after another in one program; ``2W copied``, W of twice the tokens, whose inputs are put
together first; ``2W``, the same where they lie together already, as those of a microbatch of two sequences do.

    git worktree add /tmp/before 5f4c1c46   # the last commit before biases of several axes were added as vectors
    sizes="--sequence 4096 --blocks 1"
    python scripts/compile_h100.py --model gpt $sizes --before /tmp/before --out scripts/results/bias-h100.json
    python scripts/compile_h100.py --pairs $sizes --out scripts/results/w-pairs-h100.json
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench_overlap import TINY, VARIANTS, Size, environment, middle_stage, target_devices
from scripts.hlo_schedule import count_products, custom_calls, float32_adds, kernels, moves
from scripts.provenance import commit_id

OPS = ("F", "B", "W", "BW")
AS_WRITTEN, BEFORE = "as written", "before"
ATTENTION = {"xla": "xla", "cudnn": "cudnn", AS_WRITTEN: "xla", BEFORE: ""}
"""The model's option ``attention`` for each form; older models have none."""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description="what XLA makes of stages compiled for a GPU that need not be there")
    parser.add_argument("--model", action="append", choices=("gpt", "llama"), help="only this one; may be repeated")
    parser.add_argument("--recompute", action="append", help="policy (default none); may be repeated")
    parser.add_argument("--target", default="h100", help="GPU to compile for: a name or .json of `jaxpipe plan`")
    parser.add_argument("--before", type=Path, metavar="DIR", help="a checkout of an older commit, to compare with")
    parser.add_argument("--triton", action="store_true", help="XLA's own products, not cuBLAS's")
    parser.add_argument("--pairs", action="store_true", help="W of two microbatches as one product, and as two")
    parser.add_argument("--sequence", type=int, default=Size().T, help="tokens of a sequence (default 2048)")
    parser.add_argument("--blocks", type=int, default=4, help="blocks of the stage (default 4)")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU, no wheels needed")
    parser.add_argument("--hlo", type=Path, metavar="DIR", help="write the compiled programs there")
    parser.add_argument("--out", type=Path, help="write the report here, too")
    parser.add_argument("--checkout", type=Path, help=argparse.SUPPRESS)  # whose jaxpipe and models are compiled
    args = parser.parse_args(arguments)
    if args.checkout is not None:
        sys.path.insert(0, str(args.checkout.resolve()))
    environment(1)
    devices = target_devices(args.target, 1, tiny=args.tiny)
    if isinstance(devices, str):
        print(f"compile_h100: {devices}; or try --tiny", file=sys.stderr)
        return 2
    size = TINY if args.tiny else Size(T=args.sequence)
    size = replace(size, L=args.blocks)
    forms = (
        (BEFORE,)
        if args.checkout is not None
        else [f for f in ATTENTION if f != BEFORE and (f != "cudnn" or not args.tiny)]
    )
    cases = [_pairs(m, args, size, devices) for m in args.model or ("gpt", "llama")] if args.pairs else None
    report = {
        **_provenance(args, size, arguments),
        "cases": [c for form in forms for c in _cases(form, args, size, devices)] if cases is None else cases,
    }
    if args.before is not None:
        older = _older(args.before, arguments)
        report |= {"before_commit": older["commit"], "cases": [*older["cases"], *report["cases"]]}
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0


def _cases(form: str, args: argparse.Namespace, size: Size, devices: Any) -> list[dict[str, Any]]:
    from jaxpipe.stage import jaxprs

    flatten = getattr(jaxprs, "_of_matrices", None)
    if form == AS_WRITTEN:
        setattr(jaxprs, "_of_matrices", lambda eqn: None)  # noqa: B010 - private, and absent in older commits
    cases: list[dict[str, Any]] = []
    for model in args.model or ("gpt", "llama"):
        for recompute in args.recompute or ("none",):
            variant = replace(VARIANTS[model], recompute=recompute, attention=ATTENTION[form])
            stage = middle_stage(variant, size, devices)[0]
            case = {
                "form": form,
                "model": model,
                "recompute": recompute,
                **measure(stage, size, args, f"{form}-{model}"),
            }
            cases.append(case)
            print(_line(case), file=sys.stderr, flush=True)
    if flatten is not None:
        setattr(jaxprs, "_of_matrices", flatten)  # noqa: B010
    return cases


def _pairs(model: str, args: argparse.Namespace, size: Size, devices: Any) -> dict[str, Any]:
    """Compile W, two of them in one program, and W of two microbatches at once."""
    import jax
    import jax.numpy as jnp

    from jaxpipe._jax_compat import eval_jaxpr
    from jaxpipe.planning.roofline import Efficiency, work_of
    from jaxpipe.planning.targets import find_target

    variant = replace(VARIANTS[model], attention="xla" if args.tiny else "cudnn")
    stages = [middle_stage(variant, replace(size, B=n * size.B), devices) for n in (1, 2)]
    one, two = (stage.functions["W"] for stage, _ in stages)
    mesh = stages[0][1]
    shared = [k for k, port in enumerate(one.inputs) if port.kind in ("param", "acc")]
    sums = [k for k in shared if one.inputs[k].kind == "acc"]
    own = [k for k in range(len(one.inputs)) if k not in shared]

    def run(w: Any, arrays: Mapping[int, Any]) -> list[Any]:
        results: list[Any] = eval_jaxpr(w.jaxpr.jaxpr, w.jaxpr.consts, *(arrays[k] for k in range(len(w.inputs))))
        return results

    def after_another(both: Mapping[int, Any], first: Mapping[int, Any], second: Mapping[int, Any]) -> list[Any]:
        results = zip(one.outputs, run(one, {**both, **first}), strict=True)
        half_way = dict(zip(sums, [r for port, r in results if port.kind == "acc"], strict=True))
        return run(one, {**both, **half_way, **second})

    def copied(both: Mapping[int, Any], first: Mapping[int, Any], second: Mapping[int, Any]) -> list[Any]:
        # Gradients of biases and norms come from B as sums over the microbatch.
        joined = {k: jnp.concatenate([a, second[k]]) if _rows(one, two, k) else a + second[k] for k, a in first.items()}
        return run(two, {**both, **joined})

    avals = [{k: one.avals_in[k] for k in keys} for keys in (shared, own, own)]
    programs = {"W": (one.jitted, one.avals_in, one.jaxpr)}
    for name, program in (("W, W", after_another), ("2W copied", copied)):
        specs = jax.tree.map(lambda a: a.sharding.spec, (avals, list(one.avals_out)))
        mapped = jax.shard_map(program, mesh=mesh, in_specs=tuple(specs[0]), out_specs=specs[1], check_vma=False)
        local = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), avals)
        programs[name] = jax.jit(mapped, donate_argnums=0), avals, jax.make_jaxpr(program)(*local)
    programs["2W"] = two.jitted, two.avals_in, two.jaxpr
    target, case = find_target(args.target), {"form": "pairs", "model": model, "functions": {}}
    for name, (jitted, inputs, jaxpr) in programs.items():
        compiled = jitted.lower(*inputs).compile(compiler_options=_options(args))
        launched = kernels(compiled.as_text())
        case["functions"][name] = {
            "products": count_products(compiled.as_text()),
            "launched": len(launched),
            "moved_bytes": sum(k.moved_bytes for k in launched),
            "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
            "roofline_s": work_of(jaxpr, target, Efficiency()).seconds,
        }
        print(model, name, case["functions"][name], file=sys.stderr, flush=True)
    return case


def _rows(one: Any, two: Any, k: int) -> bool:
    """Return whether the k-th input has a row for each sequence."""
    return bool(one.avals_in[k].shape != two.avals_in[k].shape)


def _options(args: argparse.Namespace) -> dict[str, Any]:
    return {} if args.tiny else {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": args.triton}


def measure(stage: Any, size: Size, args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Compile the four functions of a stage, and report them and its residuals."""
    from jaxpipe.stage.jaxprs import jaxpr_flops

    options = _options(args)
    record: dict[str, Any] = {
        "residual_bytes": stage.residual_bytes,
        "residual_arrays": sum(p.kind == "res" for p in stage.functions["F"].outputs),
        "functions": {},
    }
    for op in OPS:
        function = stage.functions[op]
        compiled = function.jitted.lower(*function.avals_in).compile(compiler_options=options)
        text, memory = compiled.as_text(), compiled.memory_analysis()
        if args.hlo is not None:
            args.hlo.mkdir(parents=True, exist_ok=True)
            (args.hlo / f"{name.replace(' ', '-')}-{op}.txt").write_text(text, encoding="utf-8")
        moved = Counter(m.kind for m in moves(text, least=size.B * size.T * size.D))
        record["functions"][op] = {
            "temp_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "output_bytes": memory.output_size_in_bytes,
            "flops": jaxpr_flops(function.jaxpr),
            "products": count_products(text),
            **{kind: moved[kind] for kind in ("copies", "transposing", "fused")},
            "added": len(float32_adds(text, least=1_000_000)),
            "launched": len(kernels(text)),
            "moved_bytes": sum(k.moved_bytes for k in kernels(text)),
            "kernels": dict(Counter(custom_calls(text))),
        }
    return record


def _older(checkout: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the report of another checkout, by this script in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        options = [*arguments, "--checkout", str(checkout), "--out", str(out)]
        options[(at := options.index("--before")) : at + 2] = []
        subprocess.run([sys.executable, __file__, *options], check=True, stdout=subprocess.DEVNULL)
        report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


def _provenance(args: argparse.Namespace, size: Size, arguments: Sequence[str]) -> dict[str, Any]:
    import jax
    import jaxlib

    from jaxpipe.planning.targets import find_target

    return {
        "device": "cpu" if args.tiny else f"{find_target(args.target).description}, compiled for without one",
        "size": asdict(size),
        "products": "Triton" if args.triton else "cuBLAS",
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "commit": commit_id() if args.checkout is None else commit_id(args.checkout),
        "command": shlex.join(["python", "scripts/compile_h100.py", *arguments]),
    }


def _line(case: Mapping[str, Any]) -> str:
    parts = ", ".join(
        f"{op} {f['temp_bytes'] / 1e6:.0f} MB {f['products']} products {f['copies']}+{f['transposing']}+{f['fused']} copies"
        for op, f in case["functions"].items()
    )
    name = f"{case['form']}, {case['model']}, {case['recompute']}"
    return f"{name}: {case['residual_bytes'] / 1e6:.0f} MB in {case['residual_arrays']} arrays; workspace {parts}"


if __name__ == "__main__":
    raise SystemExit(main())
