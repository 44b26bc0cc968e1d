"""How many tensor-parallel collectives have products under them, in programs that XLA compiled for GPUs that need not be there.

A middle stage of two transformer blocks is built by the real pipeline code (``stage/``, ``models/``), divided over ``--tp``
shards, and compiled for as many H100s: F alone, the fused backward BW alone and woven with itself, F of one microbatch and BW
of another in one program as they are, and the same woven (``stage/weave.py``); also F with B and F with W. For each program the
scheduled HLO says, for each collective, how many products stand between its start and its done. Nothing runs: these are
schedules, not times. Autotuning is off, since it would have to run kernels; ``cublas`` programs call cuBLAS for products where
the others use XLA's own kernels, and a run on GPUs chooses between the two.

Needs the wheels jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12 (no driver): see FACTS in the README of
``planning/``. ``--tiny`` runs everything at toy sizes for this machine's CPU, whose collectives are never asynchronous.

    python scripts/bench_overlap.py --out scripts/results/overlap-h100.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if TYPE_CHECKING:
    from jaxpipe.stage.functions import StageFunction, StageFunctions


@dataclass(frozen=True, slots=True)
class Size:
    """B batch, T time, D width, H heads, L layers of the stage."""

    B: int = 1
    T: int = 2048
    D: int = 4096
    H: int = 32
    L: int = 2
    dtype: str = "bfloat16"


TINY = Size(2, 16, 16, 4, 2, "float32")
VARIANTS: Mapping[str, tuple[str, bool, bool, str]] = {
    # name: model, sequence parallelism, residual fused into the all-reduce, recompute policy
    "gpt": ("models.gpt:GPT", False, False, "none"),
    "gpt-full": ("models.gpt:GPT", False, False, "full"),
    "gpt-fused-residual": ("models.gpt:GPT", False, True, "none"),
    "gpt-sequence": ("models.gpt:GPT", True, False, "none"),
    "gpt-sequence-full": ("models.gpt:GPT", True, False, "full"),
    "llama": ("models.llama:Llama", False, False, "none"),
    "llama-full": ("models.llama:Llama", False, False, "full"),
    "llama-fused-residual": ("models.llama:Llama", False, True, "none"),
    "llama-sequence": ("models.llama:Llama", True, False, "none"),
}
PROGRAMS: Mapping[str, tuple[tuple[str, ...], bool]] = {
    "F": (("F",), False),
    "BW": (("BW",), False),
    "BW woven": (("BW",), True),
    "F+BW": (("F", "BW"), False),
    "F+BW woven": (("F", "BW"), True),
    "F+B woven": (("F", "B"), True),
    "F+W woven": (("F", "W"), True),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tp", type=int, default=4, help="shards (default 4)")
    parser.add_argument("--target", default="h100", help="GPU to compile for, a name or .json of `jaxpipe plan` (default h100)")
    parser.add_argument("--variant", action="append", choices=VARIANTS, help="run only this one; may be repeated")
    parser.add_argument("--program", action="append", choices=PROGRAMS, help="compile only this one; may be repeated")
    parser.add_argument("--cublas", action="store_true", help="compile everything for cuBLAS as well, not only F+BW woven")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU, no wheels needed")
    parser.add_argument("--out", type=Path, help="write the report here, too")
    args = parser.parse_args(argv)
    _environment(args.tp)
    mesh = _mesh(args.target, args.tp, tiny=args.tiny)
    if isinstance(mesh, str):
        print(f"bench_overlap: {mesh}; or try --tiny", file=sys.stderr)
        return 2
    size = TINY if args.tiny else Size()
    cases = []
    for variant in args.variant or VARIANTS:
        stage = middle_stage(variant, size, mesh, args.tp)
        for program in args.program or PROGRAMS:
            for cublas in (False, True) if args.cublas or program == "F+BW woven" else (False,):
                case = {"variant": variant, "program": program, "cublas": cublas}
                case.update(measure(stage, *PROGRAMS[program], mesh, args.tp, cublas=cublas, gpu=not args.tiny))
                cases.append(case)
                print(_line(case), file=sys.stderr, flush=True)
    report = json.dumps({**_provenance(args.target, size, args.tp, tiny=args.tiny), "cases": cases}, indent=1)
    if args.out:
        args.out.write_text(report + "\n", encoding="utf-8")
    print(report)
    return 0


def middle_stage(variant: str, size: Size, mesh: Any, shards: int) -> StageFunctions:
    """A stage of ``size.L`` blocks between two others."""
    import jax

    from jaxpipe.mesh import TensorParallel
    from jaxpipe.stage.compile import build_stage_functions
    from jaxpipe.stage.reference import resolve_model

    name, sequence, fused, recompute = VARIANTS[variant]
    options = {"d_model": size.D, "num_heads": size.H, "num_layers": size.L, "seq_len": size.T, "vocab_size": 16 * shards}
    model = resolve_model(name, {**options, "dtype": size.dtype})
    avals = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in model.layers}
    x = jax.ShapeDtypeStruct((size.B, size.T, size.D), size.dtype)
    tp = TensorParallel(shards, sequence=sequence, fused_residual=fused)
    blocks = model.layers[1:-2]
    return build_stage_functions(blocks, 1, avals, x, model.batch_spec(size.B), mesh, 1, False, recompute, tp=tp)


def measure(
    stage: StageFunctions, ops: Sequence[str], woven: bool, mesh: Any, shards: int, *, cublas: bool, gpu: bool
) -> dict[str, Any]:
    """Compiles these operations of the stage, on microbatches of their own, as one program."""
    import jax

    from jaxpipe._jax_compat import eval_jaxpr
    from jaxpipe.stage.weave import GPU_OVERLAP_OPTIONS, weave
    from scripts.hlo_schedule import count_products, overlaps

    functions = [stage.functions[op] for op in ops]
    result: dict[str, Any] = {}
    if woven:
        plan = weave([f.jaxpr for f in functions], shards=shards, shared=shared_parameters(functions))
        programs, inputs = [plan.jaxpr], [functions[p].avals_in[k] for p, k in plan.inputs]
        result["planned"] = {
            "covered": sum(c.covered for c in plan.collectives),
            "collectives": [str(c) for c in plan.collectives],
            "exposed_us": round(plan.exposed_s * 1e6, 1),
            "makespan_us": round(plan.makespan_s * 1e6, 1),
        }
        donated = [i for i, (p, k) in enumerate(plan.inputs) if k in functions[p].donated]
    else:
        programs, inputs = [f.jaxpr for f in functions], [a for f in functions for a in f.avals_in]
        starts = [sum(len(f.avals_in) for f in functions[:p]) for p in range(len(functions))]
        donated = [start + k for start, f in zip(starts, functions, strict=True) for k in f.donated]

    def run(*arrays: Any) -> tuple[Any, ...]:
        rest, out = list(arrays), []
        for closed in programs:
            mine = [rest.pop(0).reshape(v.aval.shape) for v in closed.jaxpr.invars]
            out += eval_jaxpr(closed.jaxpr, closed.consts, *mine)
        results = [a for f in functions for a in f.avals_out]
        return tuple(jax.numpy.reshape(v, (1,)) if a.shape and not v.shape else v for v, a in zip(out, results, strict=True))

    specs = [tuple(a.sharding.spec for a in avals) for avals in (inputs, [a for f in functions for a in f.avals_out])]
    mapped = jax.shard_map(run, mesh=mesh, in_specs=specs[0], out_specs=specs[1], check_vma=False)
    options: dict[str, Any] = {}
    if gpu:
        options = {**GPU_OVERLAP_OPTIONS, "xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": not cublas}
    start = time.monotonic()
    compiled = jax.jit(mapped, donate_argnums=donated).lower(*inputs).compile(compiler_options=options)
    took = time.monotonic() - start
    text, memory = compiled.as_text(), compiled.memory_analysis()
    found = [o for o in overlaps(text) if o.result_bytes * shards * 8 >= max(x.result_bytes for x in overlaps(text))]
    return {
        **result,
        "collectives": len(found),
        "covered": sum(o.covered for o in found),
        "products_under_each": [o.products if not o.is_sync else 0 for o in found],
        "others_under_each": [o.others if not o.is_sync else 0 for o in found],
        "kinds": [o.kind for o in found],
        "products": count_products(text),
        "temp_bytes": memory.temp_size_in_bytes,
        "compile_s": round(took, 2),
    }


def shared_parameters(functions: Sequence[StageFunction]) -> dict[tuple[int, int], tuple[int, int]]:
    """Parameters that a function reads like one before it: the same buffers, as all are of one stage."""
    first: dict[Any, tuple[int, int]] = {}
    shared: dict[tuple[int, int], tuple[int, int]] = {}
    for p, function in enumerate(functions):
        for k, port in enumerate(function.inputs):
            if port.kind == "param":
                if port in first:
                    shared[p, k] = first[port]
                else:
                    first[port] = (p, k)
    return shared


def _environment(shards: int) -> None:
    """What XLA and JAX read when they are loaded."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    flag = "--xla_force_host_platform_device_count"
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={shards}".strip()


def _mesh(target: str, shards: int, *, tiny: bool) -> Any:
    """A submesh of one rank, or the reason why there is none."""
    import jax
    import numpy as np

    from jaxpipe._jax_compat import compile_only_devices
    from jaxpipe.mesh import AXES
    from jaxpipe.planning.targets import device_text, find_target

    devices = jax.devices("cpu") if tiny else compile_only_devices(target, device_text(find_target(target)), shards)
    if isinstance(devices, str):
        return devices
    if len(devices) < shards:
        return f"{shards} shards need as many devices, there are {len(devices)}"
    grid = np.array(list(devices[:shards]), dtype=object).reshape(1, shards)
    return jax.sharding.Mesh(grid, AXES)


def _provenance(target: str, size: Size, shards: int, *, tiny: bool) -> dict[str, Any]:
    import jax
    import jaxlib

    from jaxpipe.planning.targets import find_target
    from jaxpipe.stage.weave import GPU_OVERLAP_OPTIONS
    from scripts.commit_id import commit_id

    return {
        "device": "cpu" if tiny else f"{shards} x {find_target(target).description}, compiled for without one",
        "size": {name: getattr(size, name) for name in size.__slots__},
        "tp": shards,
        "options": {**GPU_OVERLAP_OPTIONS, "xla_gpu_autotune_level": 0},
        "versions": {"python": platform.python_version(), "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "commit": commit_id(),
        "command": shlex.join(["python", "scripts/bench_overlap.py", *sys.argv[1:]]),
    }


def _line(case: Mapping[str, Any]) -> str:
    planned = f", planned {case['planned']['covered']}" if "planned" in case else ""
    kind = " cuBLAS" if case["cublas"] else ""
    return (
        f"{case['variant']:22s} {case['program'] + kind:20s} {case['covered']:2d} of {case['collectives']:2d} covered{planned}, "
        f"{case['temp_bytes'] / 1e6:.0f} MB workspace, {case['compile_s']} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
