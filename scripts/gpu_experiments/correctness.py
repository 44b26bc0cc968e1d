"""The experiment on bits: whether gradients on a GPU are right, and when they are the same bits again."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.gpu_experiments.here import lacks_module
from scripts.gpu_experiments.process import call_apart, with_flags
from scripts.gpu_experiments.registry import ROOT, Settings, experiment

_FAMILIES = (
    "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-1p", "v-zb", "v-half", "v-min", "po-h", "po-f"
)  # fmt: skip
_SMALL = {"vocab_size": 64, "d_model": 64, "num_heads": 2, "seq_len": 32}
_MODELS: Mapping[str, Mapping[str, Any]] = {
    "models.gpt:GPT": {**_SMALL, "tied": False},
    "models.llama:Llama": {**_SMALL, "num_kv_heads": 1, "qkv_bias": True},
    "models.clip:CLIP": {
        "vocab_size": 64, "image_size": 64, "image_layers": 1, "text_size": 64, "text_layers": 1, "embed_size": 64,
    },
    "models.vlm:VLM": {"vocab_size": 64, "d_model": 64, "vit_size": 64},
}  # fmt: skip
"""Options by model; those of one tower get a block a stage."""
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_DUMP, _LOAD = "--xla_gpu_dump_autotune_results_to", "--xla_gpu_load_autotune_results_from"
_ATTENTION: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "window": {"window": 48},
    "padding": {"causal": False, "lengths": (100, 37)},
    "grouped": {"kv_heads": 2},
}
"""Options of the attention that both kernels compute on 2 sequences of 128, 8 heads of 64."""
_LIMIT_S = 120


@experiment(
    "T2",
    version=2,
    question="are gradients right on a GPU, and the same bits in every order and every process?",
    backs="README line 6, U9, U11, U12",
    paths=("jaxpipe/stage", "jaxpipe/runtime", "jaxpipe/program", "models"),
    estimate_s=150,
    predicted={
        "default flags": "cuDNN's B differs from run to run",
        "deterministic": "0 differing orders; 0 processes with the autotune file, perhaps some without",
        "bfloat16 attention, cuDNN and xla": "1e-2",
        "GPT-2's logits": "1e-6 of the largest",
    },
    want={
        "largest_relative_error": "<= 1e-5",
        "deterministic.differing_orders": "== 0",
        "deterministic.differing_processes": "== 0",
        "imported_logits_error": "<= 1e-5",
        "largest_attention_error": "<= 2e-2",
    },
)
def right_and_same_bits(settings: Settings) -> dict[str, Any]:
    """Compare gradients in float32 with the CPU's, of all orders with each other, of processes with each other, the second with
    the kernels that the first has chosen or with its own choice; logits of an imported GPT-2 with transformers'; the two
    attention kernels in bfloat16 with float32."""
    errors = call_apart(gradient_errors, settings, limit_s=_LIMIT_S, environment={})
    attention = call_apart(attention_errors, settings, limit_s=_LIMIT_S, environment={})
    numbers: dict[str, Any] = {
        "relative_errors": errors,
        "largest_relative_error": _largest(errors),
        "imported_logits_error": call_apart(imported_logits_error, settings, limit_s=_LIMIT_S, environment={}),
        "attention_errors": attention,
        "largest_attention_error": _largest(
            attention if "failure" in attention else {k: _largest(x) for k, x in attention.items()}
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        chosen = str(Path(folder, "autotune.txt"))
        plain = without_autotuning(with_flags()["XLA_FLAGS"])
        cases = {
            "default": [plain, plain],
            "deterministic": [f"{plain} {_DETERMINISTIC} {way}={chosen}" for way in (_DUMP, _LOAD)],
            "deterministic, own kernels": [f"{plain} {_DETERMINISTIC}"] * 2,
        }
        for name, (first, second) in list(cases.items())[slice(1, 2) if settings.tiny else slice(None)]:
            numbers[name] = _same_bits(settings, [first] if settings.tiny else [first, second])
    return numbers


def _largest(errors: Mapping[str, Any]) -> float | None:
    """Return the largest error; None where the process that looked for them failed."""
    return None if "failure" in errors else max(errors.values())


def without_autotuning(flags: str) -> str:
    """Return flags of XLA without those that name a file of chosen kernels."""
    return " ".join(flag for flag in flags.split() if not flag.startswith((_DUMP, _LOAD)))


def _same_bits(settings: Settings, flags_of_processes: Sequence[str]) -> dict[str, Any]:
    names = ("1f1b", "zb-h1") if settings.tiny else _FAMILIES
    digests = []
    for flags in flags_of_processes:
        # A cache of its own: from a common one the second would take the first's programs, kernels and all.
        with tempfile.TemporaryDirectory() as cache:
            environment = {"XLA_FLAGS": flags, "JAX_COMPILATION_CACHE_DIR": cache}
            digests.append(call_apart(digests_of_orders, settings, names, limit_s=_LIMIT_S, environment=environment))
    if any("failure" in x for x in digests):
        return {"digests": digests}
    first, last = digests[0], digests[-1]
    return {
        "digests": digests,
        "differing_orders": len(set(first.values())) - 1,
        "differing_processes": sum(first[family] != last[family] for family in names),
    }


def gradient_errors(settings: Settings) -> dict[str, float]:
    """Return, by model, the largest error of a gradient or the loss against the CPU's, ÷ the largest value of that leaf."""
    import jax
    import numpy as np

    # Products in float32 are TF32 otherwise.
    jax.config.update("jax_default_matmul_precision", "highest")
    errors = {}
    for target in list(_MODELS)[2:3] if settings.tiny else _MODELS:
        devices = dict.fromkeys((jax.devices()[0], jax.devices("cpu")[0]))
        # CLIP's towers are no chain: one stage.
        stages = 1 if target.endswith("CLIP") else 2
        leaves = [jax.tree.leaves(Gradients(target, device, stages).under("zb-h1")) for device in devices]
        errors[target] = max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(float(np.abs(b).max()), 1e-30))
            for a, b in zip(leaves[0], leaves[-1], strict=True)
        )
    return errors


def digests_of_orders(settings: Settings, names: Sequence[str]) -> dict[str, str]:
    """Return a digest of loss and gradients of a bfloat16 GPT by family of orders."""
    import jax
    import numpy as np

    digests = {}
    gradients = Gradients("models.gpt:GPT", jax.devices()[0], 2 if settings.tiny else 4, "bfloat16")
    for name in names:
        sha = hashlib.sha1(usedforsecurity=False)
        for leaf in jax.tree.leaves(gradients.under(name)):
            sha.update(np.ascontiguousarray(np.asarray(leaf, np.float32)).tobytes())
        digests[name] = sha.hexdigest()
    return digests


class Gradients:
    """Holds a model cut into stages, and gives its loss and gradients under any order."""

    def __init__(self, target: str, device: Any, stages: int, dtype: str = "float32") -> None:
        from jaxpipe.stage.model.reference import init_params, resolve_model

        blocks = {} if target.endswith("CLIP") else {"num_layers": stages}
        self._model = resolve_model(target, {**_MODELS[target], **blocks})
        self._params = init_params(self._model, 0)
        self._device, self._stages, self._dtype = device, stages, dtype
        self._pipelines: dict[Any, Any] = {}

    def under(self, family: str) -> Any:
        """Return the loss and the gradients by layer. Orders that place stages alike share their compiled functions."""
        import jax.numpy as jnp

        from jaxpipe.runtime.pipeline import Pipeline
        from jaxpipe.schedule import generate

        # Two chunks on half as many ranks, or one: the stages are the same.
        ranks = (self._stages, max(1, self._stages // 2))
        schedule = next(s for s in (generate(family, p, 4) for p in ranks) if s.num_stages == self._stages)
        pipe = self._pipelines.get(schedule.placement.flows)
        if pipe is None:
            pipe = self._pipelines[schedule.placement.flows] = Pipeline.build(
                self._model,
                schedule,
                microbatch_size=2,
                devices=[self._device] * schedule.num_ranks,
                compute_dtype=jnp.dtype(self._dtype),
                recompute="flash",
            )
        pipe = pipe.with_schedule(schedule)
        return pipe.loss_and_grads(pipe.place(self._params), self._batch())

    def _batch(self) -> dict[str, Any]:
        import numpy as np

        rng = np.random.default_rng(0)
        batch = {
            name: rng.integers(1, 64, (4, *aval.shape)).astype(aval.dtype)
            if np.issubdtype(aval.dtype, np.integer)
            else np.ones((4, *aval.shape), aval.dtype)
            for name, aval in self._model.batch_spec(2).items()
        }
        if {"images", "targets"} <= batch.keys():
            batch["tokens"][..., :4] = 0  # the places of a picture's features
        return batch


def imported_logits_error(settings: Settings) -> float | None:
    """Return the largest error of logits of a tiny GPT-2 (its qkv has biases), imported from a folder of the hub, against those
    that transformers computed, ÷ the largest; None without safetensors."""
    if lacks_module("safetensors"):
        return None
    import jax
    import numpy as np

    from jaxpipe.interop.hub import open_hub, weights_of
    from jaxpipe.stage.model.reference import init_params, logits, resolve_model
    from tests.support.hub_folders import TOKENS, V, write_folder

    jax.config.update("jax_default_matmul_precision", "highest")
    golden = json.loads((ROOT / "tests/golden/hub_logits.json").read_text(encoding="utf-8"))["logits"]["gpt2"]
    with tempfile.TemporaryDirectory() as folder:
        hub = open_hub(write_folder(Path(folder, "gpt2"), "gpt2"))
        options = {"seq_len": 24, **hub.options}
        model = resolve_model(hub.target, options)
        weights = weights_of(hub, options, jax.eval_shape(lambda: init_params(model, 0)))
        params = {layer: weights.read(layer) for layer in weights.layers}
    ours = np.asarray(jax.jit(lambda p: logits(model, p, TOKENS))(params))
    shown = [ours[row, t, :V:9] for row, t in ((0, 0), (0, 11), (1, 23))]
    return float(np.abs(np.asarray(shown) - np.asarray(golden["shown"])).max() / golden["largest"])


def attention_errors(settings: Settings) -> dict[str, dict[str, float]]:
    """Return, by case and kernel, the largest difference of outputs and gradients in bfloat16 from the XLA kernel's in float32,
    ÷ the largest value. On a CPU there is no cuDNN, and so one kernel."""
    import jax

    kernels = ("xla",) if jax.default_backend() == "cpu" else ("xla", "cudnn")
    names = ["window"] if settings.tiny else list(_ATTENTION)
    return {name: {kernel: _attention_error(kernel, **_ATTENTION[name]) for kernel in kernels} for name in names}


def _attention_error(kernel: str, *, kv_heads: int = 8, lengths: Sequence[int] = (), **options: Any) -> float:
    import jax
    import jax.numpy as jnp

    from models.attention import attention

    shapes = ((2, 128, 8, 64), (2, 128, kv_heads, 64), (2, 128, kv_heads, 64))
    exact = [jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate(shapes)]
    cotangent = jax.random.normal(jax.random.key(3), shapes[0])
    if lengths:
        options["lengths"] = jnp.asarray(lengths, jnp.int32)
        # What stands on padding means nothing.
        cotangent *= (jnp.arange(128) < options["lengths"][:, None])[..., None, None]

    def results(kernel: str, dtype: Any, inputs: Any, cotangent: Any) -> list[Any]:
        def seen(q: Any, k: Any, v: Any) -> Any:
            return attention(q, k, v, kernel=kernel, **options) * (cotangent != 0).astype(dtype)

        out, pullback = jax.vjp(seen, *(x.astype(dtype) for x in inputs))
        return [out, *pullback(cotangent.astype(dtype))]

    run = jax.jit(results, static_argnums=(0, 1))
    with jax.default_matmul_precision("highest"):
        expected = run("xla", "float32", exact, cotangent)
    return max(
        float(jnp.abs(x.astype(jnp.float32) - y).max() / jnp.abs(y).max())
        for x, y in zip(run(kernel, "bfloat16", exact, cotangent), expected, strict=True)
    )
