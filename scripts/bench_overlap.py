"""How many collectives have products under them, in programs that XLA compiled for GPUs that need not be there.

A middle stage of two transformer blocks is built by the pipeline's own code, divided over ``--tp`` shards (``-ring``: of time,
with ring attention), and compiled for as many H100s: F, B and the fused backward BW alone; F of one microbatch and BW of
another side by side in one program; and what the runtime runs: BW woven with itself, F+BW, F+B and F+W woven
(``stage/weave/weaver.py``). The scheduled HLO of each program says how many products stand between the start and the done of
each collective (``hlo_schedule.py``). Nothing runs: these are schedules, not times. Autotuning is off, since it would have to
run kernels; ``cublas`` programs call cuBLAS for products where the others use XLA's own kernels, and a run on GPUs chooses
between the two. ``--cp`` divides the sequence over so many times as many shards. ``experts`` has two blocks of experts with the
widths of Qwen3-30B-A3B, which the shards divide, each with a row of its own.

``written`` is how many collectives the functions' jaxprs hold. A woven program that has fewer after XLA is a failure (exit
code 1): its combiner merged what the weaver keeps apart. ``--estimate`` adds seconds by two models that do not know each other:
``xla``, its latency-hiding scheduler with the analytical speed-of-light estimator, and ``ours``, ``UnitCosts``; each of the
whole program and of the part in which compute waits for a collective. Ours lets nothing run under the collectives of programs
that are not woven. XLA's takes products for cuBLAS only to be as fast as they are, and of these (jax 0.10.2, H100) those with a
transposed operand for 60 times slower: its seconds of F, and of collectives there, are the ones to compare.

Needs the wheels jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12, no GPU and no driver. ``--tiny`` runs it all at
toy sizes for this machine's CPU, whose collectives are never asynchronous.

    python scripts/bench_overlap.py --out scripts/results/overlap-h100.json
    python scripts/bench_overlap.py --tp 4 --cp 2 --estimate --out scripts/results/overlap-tp4-cp2-h100.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from jaxpipe.axes import RankMesh
    from jaxpipe.stage.functions import StageFunctions


@dataclass(frozen=True, slots=True)
class Size:
    """B batch, T time, D width, H heads, L layers of the stage."""

    B: int = 1
    T: int = 2048
    D: int = 4096
    H: int = 32
    L: int = 2
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Variant:
    """A model and how its stage is made. ``attention``: the model's option, empty where it has none (older commits). ``cp``:
    how attention is computed where the shards divide time, not layers. ``experts``: the form of products with experts, which
    the shards divide; empty: there are none."""

    model: str
    sequence: bool = False
    fused_residual: bool = False
    recompute: str = "none"
    attention: str = "xla"
    cp: str = ""
    experts: str = ""

    def mesh(self, shards: int, cp: int = 1) -> RankMesh:
        """Return the axes along which so many shards lie, ``cp`` of them along time where the variant does not say."""
        from jaxpipe.axes import RankMesh

        if self.experts:
            return RankMesh(dp=shards, ep=shards)
        cp = shards if self.cp else cp
        how: dict[str, Any] = {"sequence": self.sequence, "fused_residual": self.fused_residual}
        return RankMesh(tp=shards // cp, cp=cp, cp_method=self.cp or "gather", **how)

    def size(self, size: Size, shards: int) -> Size:
        """Return the sizes of its stage: of experts, a row a shard, half as wide and twice as long (D 2048, T 4096)."""
        if not self.experts:
            return size
        return replace(size, B=size.B * shards, T=2 * size.T, D=size.D // 2, H=size.H // 2)


TINY = Size(2, 16, 16, 4, 2, "float32")
_GPT, _LLAMA, _MOE = "models.gpt:GPT", "models.llama:Llama", "models.moe:MoE"
VARIANTS: Mapping[str, Variant] = {
    "gpt": Variant(_GPT),
    "gpt-full": Variant(_GPT, recompute="full"),
    "gpt-fused-residual": Variant(_GPT, fused_residual=True),
    "gpt-sequence": Variant(_GPT, sequence=True),
    "gpt-sequence-full": Variant(_GPT, sequence=True, recompute="full"),
    "llama": Variant(_LLAMA),
    "llama-full": Variant(_LLAMA, recompute="full"),
    "llama-fused-residual": Variant(_LLAMA, fused_residual=True),
    "llama-sequence": Variant(_LLAMA, sequence=True),
    "gpt-ring": Variant(_GPT, cp="ring", recompute="flash"),
    "llama-ring": Variant(_LLAMA, cp="ring", recompute="flash"),
    "experts": Variant(_MOE, experts="padded"),
    "experts-ragged": Variant(_MOE, experts="ragged"),
}
PROGRAMS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    # name: operations, woven
    "F": (("F",), False),
    "B": (("B",), False),
    "BW": (("BW",), False),
    "BW woven": (("BW",), True),
    "F+BW": (("F", "BW"), False),
    "F+BW woven": (("F", "BW"), True),
    "F+B woven": (("F", "B"), True),
    "F+W woven": (("F", "W"), True),
}
_LEAST_SHARE = 1 / 8  # of the largest collective; smaller ones move statistics


def main(argv: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(description="collectives with products under them, in programs compiled for GPUs")
    parser.add_argument("--tp", type=int, default=4, help="shards (default 4)")
    parser.add_argument("--cp", type=int, default=1, help="shards of the sequence beside these (default 1)")
    parser.add_argument("--target", default="h100", help="GPU to compile for: a name or .json of `jaxpipe plan`")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="only this one; may be repeated")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="only this one; may be repeated")
    parser.add_argument("--cublas", action="store_true", help="everything for cuBLAS as well, not only F+BW woven")
    parser.add_argument("--estimate", action="store_true", help="seconds by XLA's model and by ours, too")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU, no wheels needed")
    parser.add_argument("--out", type=Path, help="write the report here, too, after each program")
    args = parser.parse_args(arguments)
    shards = args.tp * args.cp
    environment(shards)
    devices = target_devices(args.target, shards, tiny=args.tiny)
    if isinstance(devices, str):
        print(f"bench_overlap: {devices}; or try --tiny", file=sys.stderr)
        return 2
    variants = {name: VARIANTS[name] for name in args.variant or VARIANTS}
    size = TINY if args.tiny else Size()
    # Those of the first, where all have the same.
    sizes = [variant.size(size, shards) for variant in variants.values()]
    meshes = [str(variant.mesh(shards, args.cp)) for variant in variants.values()]
    shown = sizes[0] if len(set(sizes)) == 1 else size
    report = {**_provenance(args.target, shown, args.tp, args.cp, arguments, tiny=args.tiny), "cases": []}
    report |= {"mesh": meshes[0]} if len(set(meshes)) == 1 else {}
    for variant in variants:
        stage, mesh = middle_stage(VARIANTS[variant], size, devices, args.cp)
        for program in args.program or PROGRAMS:
            for cublas in (False, True) if args.cublas or program == "F+BW woven" else (False,):
                options: dict[str, Any] = {"cublas": cublas, "gpu": not args.tiny, "estimate": args.estimate and cublas}
                case = measure(stage, *PROGRAMS[program], mesh, **options)
                report["cases"].append({"variant": variant, "program": program, "cublas": cublas, **case})
                print(_line(report["cases"][-1]), file=sys.stderr, flush=True)
                if args.out:
                    args.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    for case in merged(report["cases"]):
        print(f"bench_overlap: XLA merged collectives that were kept apart: {_line(case)}", file=sys.stderr)
    return 1 if merged(report["cases"]) else 0


def merged(cases: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the woven programs that have fewer collectives after XLA than before."""
    return [case for case in cases if PROGRAMS[case["program"]][1] and case["collectives"] < case["written"]]


def middle_stage(variant: Variant, size: Size, devices: Any, cp: int = 1) -> tuple[StageFunctions, Any]:
    """Return a stage of ``size.L`` blocks between two others, and the mesh of its devices."""
    import jax

    from jaxpipe.context_parallel import shard_avals
    from jaxpipe.mesh import mesh_over
    from jaxpipe.stage.compiled.compile import build_all
    from jaxpipe.stage.model.reference import resolve_model

    tp, size = variant.mesh(len(devices), cp), variant.size(size, len(devices))
    mesh = mesh_over(tp, devices)
    options: dict[str, Any] = {"attention": variant.attention} if variant.attention else {}
    if variant.experts:
        options |= {"num_experts": 16 * tp.ep, "top_k": 8, "expert_size": 3 * size.D // 8, "products": variant.experts}
        options |= {"capacity": 1.25, "buffer": 2.0}
    options |= {"d_model": size.D, "num_heads": size.H, "num_layers": size.L, "seq_len": size.T, "dtype": size.dtype}
    model = resolve_model(variant.model, {"vocab_size": 16 * tp.num_devices, **options})
    avals = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    cut = [model.layers[:1], model.layers[1:-2], model.layers[-2:]]
    data = shard_avals(model.name, model.batch_spec(size.B), model.over_time, tp)
    return build_all(cut, avals, data, [mesh] * 3, variant.recompute, tp=tp)[1], mesh


def measure(
    stage: StageFunctions,
    ops: Sequence[str],
    woven: bool,
    mesh: Any,
    *,
    cublas: bool,
    gpu: bool,
    estimate: bool = False,
) -> dict[str, Any]:
    """Compiles these operations of the stage, on microbatches of their own, as one program, and reads its schedule."""
    from jaxpipe.stage.weave.weaver import weave
    from scripts.hlo_schedule import count_products, overlaps

    plan = weave([stage.functions[op].jaxpr for op in ops], mesh.shape)
    jitted, inputs = _woven(stage, ops) if woven else _side_by_side(stage, ops, mesh)
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": not cublas} if gpu else {}
    start = time.monotonic()
    compiled = jitted.lower(*inputs).compile(compiler_options=options)
    took = time.monotonic() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    collectives = overlaps(text)
    large = [o for o in collectives if o.whole_bytes >= _LEAST_SHARE * max(x.whole_bytes for x in collectives)]
    extra: dict[str, Any] = {"planned": [asdict(c) for c in plan.collectives]} if woven else {}
    if estimate:
        total_s, exposed_s = plan.makespan_s, plan.exposed_s
        if not woven:
            exposed_s = sum(c.seconds for c in plan.collectives)
            total_s = plan.makespan_s - plan.exposed_s + exposed_s
        extra |= {"ours": {"seconds": total_s, "exposed_s": exposed_s}, "xla": _estimate(jitted, inputs, options)}
    return {
        "written": len(plan.collectives),
        "collectives": len(large),
        "covered": sum(o.covered for o in large),
        "products_under_each": [o.products for o in large],
        "others_under_each": [o.other_kernels for o in large],
        "kinds": [o.kind for o in large],
        "products": count_products(text),
        "temp_bytes": memory.temp_size_in_bytes,
        "compile_s": round(took, 2),
        **extra,
    }


def _estimate(jitted: Any, inputs: Any, options: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the seconds of the program by XLA's latency-hiding scheduler; None where there is none, as on CPUs."""
    with tempfile.TemporaryDirectory() as folder:
        dumping = {
            "xla_gpu_enable_analytical_sol_latency_estimator": True,
            "xla_dump_latency_hiding_schedule": True,
            "xla_dump_to": folder,
        }
        jitted.lower(*inputs).compile(compiler_options={**options, **(dumping if options else {})})
        texts = [path.read_text(encoding="utf-8") for path in Path(folder).glob("*.schedule.txt")]
    if not texts:
        return None
    figures = dict(re.findall(r"(total_cycles|total_wasted_cycles|cycles_per_microsecond): ([\d.e+]+)", texts[0]))
    total, wasted = (float(figures.get(name, 0)) for name in ("total_cycles", "total_wasted_cycles"))
    second = 1e6 * float(figures["cycles_per_microsecond"])
    return {"seconds": total / second, "exposed_s": wasted / second}


def _woven(stage: StageFunctions, ops: Sequence[str]) -> tuple[Any, Any]:
    """Return the program that the runtime runs: a braid of functions, or one function woven with itself."""
    from jaxpipe.stage.compiled.braid import braid
    from jaxpipe.stage.compiled.compile import BuildCache

    functions = [stage.functions[op] for op in ops]
    function = functions[0] if len(functions) == 1 else braid([(stage.stage, f) for f in functions], BuildCache())
    return function.jitted, function.avals_in


def _side_by_side(stage: StageFunctions, ops: Sequence[str], mesh: Any) -> tuple[Any, Any]:
    """The functions one after another in one program, the parameters passed once."""
    import jax

    from jaxpipe._jax_compat import eval_jaxpr
    from jaxpipe.stage.compiled.compile import options_for

    functions = [stage.functions[op] for op in ops]
    inputs: dict[Any, Any] = {}
    for p, f in enumerate(functions):
        for port, aval in zip(f.inputs, f.avals_in, strict=True):
            inputs.setdefault(_argument(p, port), aval)
    outputs = [a for f in functions for a in f.avals_out]

    def run(*arrays: Any) -> tuple[Any, ...]:
        value_by_name, out = dict(zip(inputs, arrays, strict=True)), []
        for p, f in enumerate(functions):
            arguments = [value_by_name[_argument(p, port)] for port in f.inputs]
            local = [a.reshape(v.aval.shape) for a, v in zip(arguments, f.jaxpr.jaxpr.invars, strict=True)]
            out += eval_jaxpr(f.jaxpr.jaxpr, f.jaxpr.consts, *local)
        return tuple(
            jax.numpy.reshape(v, (1,) * len(a.shape)) if jax.numpy.ndim(v) == 0 else v
            for v, a in zip(out, outputs, strict=True)
        )

    specs = [tuple(a.sharding.spec for a in avals) for avals in (inputs.values(), outputs)]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    donated = [k for k, (_, port) in enumerate(inputs) if port.kind == "acc"]
    jitted = jax.jit(mapped, donate_argnums=donated, compiler_options=dict(options_for(mesh)) or None)
    return jitted, list(inputs.values())


def _argument(part: int, port: Any) -> tuple[int, Any]:
    """Return the name of an argument: parameters belong to the stage, other arguments to the part."""
    return (-1 if port.kind == "param" else part, port)


def target_devices(target: str, count: int, *, tiny: bool) -> Any:
    """Return the devices of one rank, or the reason why there are none."""
    import jax

    from jaxpipe._jax_compat import compile_only_devices
    from jaxpipe.planning.targets import device_text, find_target

    devices = jax.devices("cpu") if tiny else compile_only_devices(target, device_text(find_target(target)), count)
    if isinstance(devices, str):
        return devices
    if len(devices) < count:
        return f"{count} shards need as many devices, there are {len(devices)}"
    return devices[:count]


def environment(shards: int) -> None:
    """Set the environment that XLA and JAX read when they are loaded."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={shards}".strip()


def _provenance(target: str, size: Size, tp: int, cp: int, arguments: Sequence[str], *, tiny: bool) -> dict[str, Any]:
    import jax
    import jaxlib

    from jaxpipe.planning.targets import find_target
    from jaxpipe.stage.weave.weaver import GPU_OVERLAP_OPTIONS
    from scripts.provenance import commit_id

    return {
        "device": "cpu" if tiny else f"{tp * cp} x {find_target(target).description}, compiled for without one",
        "size": asdict(size),
        "tp": tp,
        "cp": cp,
        "options": {} if tiny else {**GPU_OVERLAP_OPTIONS, "xla_gpu_autotune_level": 0},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "commit": commit_id(),
        "command": shlex.join(["python", "scripts/bench_overlap.py", *arguments]),
    }


def _line(case: Mapping[str, Any]) -> str:
    name = case["program"] + (" cuBLAS" if case["cublas"] else "")
    planned = f", planned {sum(c['products'] > 0 for c in case['planned'])}" if "planned" in case else ""
    models = [(name, case[name]) for name in ("xla", "ours") if case.get(name)]
    exposed = "".join(
        f", {name} {m['exposed_s'] * 1e6:.0f} of {m['seconds'] * 1e6:.0f} µs exposed" for name, m in models
    )
    return (
        f"{case['variant']:22s} {name:20s} {case['covered']:2d} of {case['collectives']:2d} covered{planned}, "
        f"{case['temp_bytes'] / 1e6:.0f} MB workspace, {case['compile_s']} s{exposed}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
