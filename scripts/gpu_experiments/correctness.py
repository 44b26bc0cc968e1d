"""The experiment on bits: whether gradients on a GPU are right, and when they are the same bits again."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.gpu_experiments.blocks import middle_block
from scripts.gpu_experiments.process import call_apart, with_flags
from scripts.gpu_experiments.registry import Settings, experiment

_FAMILIES = (
    "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-1p", "v-zb", "v-half", "v-min", "po-h", "po-f"
)  # fmt: skip
_MODELS: Mapping[str, Mapping[str, Any]] = {"models.gpt:GPT": {"tied": False}, "models.llama:Llama": {}}
_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
_LIMIT_S = 120


@experiment(
    "T2",
    version=1,
    question="are gradients right on a GPU, and the same bits in every order and every process?",
    backs="README line 6, U9, U11, U12",
    paths=("jaxpipe/stage", "jaxpipe/runtime", "jaxpipe/program", "models"),
    estimate_s=170,
    predicted={
        "default flags": "cuDNN's B differs from run to run",
        "deterministic": "0 differing orders and processes",
        "bfloat16 attention, cuDNN and xla": "1e-2",
    },
    want={
        "largest_relative_error": "<= 1e-5",
        "deterministic.differing_orders": "== 0",
        "deterministic.differing_processes": "== 0",
        "attention_difference": "<= 2e-2",
    },
)
def right_and_same_bits(settings: Settings) -> dict[str, Any]:
    """Compare gradients in float32 with the CPU's, of all orders with each other, of processes with each other; outputs of the
    two attention kernels in bfloat16."""
    errors = call_apart(gradient_errors, settings, limit_s=_LIMIT_S, environment={})
    flags = {"default": with_flags(), "deterministic": with_flags(_DETERMINISTIC)}
    names = ("1f1b", "zb-h1") if settings.tiny else _FAMILIES
    numbers: dict[str, Any] = {"relative_errors": errors, "largest_relative_error": max(errors.values())}
    for name, environment in flags.items():
        if settings.tiny and name == "default":
            continue
        digests = [
            call_apart(digests_of_orders, settings, names, limit_s=_LIMIT_S, environment=environment)
            for _ in range(1 if settings.tiny else 2)
        ]
        first, last = digests[0], digests[-1]
        numbers[name] = {
            "digests": digests,
            "differing_orders": len(set(first.values())) - 1,
            "differing_processes": sum(first[family] != last[family] for family in names),
        }
    numbers["attention_difference"] = call_apart(attention_difference, settings, limit_s=_LIMIT_S, environment={})
    return numbers


def gradient_errors(settings: Settings) -> dict[str, float]:
    """Return, by model, the largest error of a gradient or the loss against the CPU's, ÷ the largest value of that leaf."""
    import jax
    import numpy as np

    # Products in float32 are TF32 otherwise.
    jax.config.update("jax_default_matmul_precision", "highest")
    errors = {}
    for target in list(_MODELS)[: 1 if settings.tiny else None]:
        devices = dict.fromkeys((jax.devices()[0], jax.devices("cpu")[0]))
        leaves = [jax.tree.leaves(Gradients(target, device).under("zb-h1")) for device in devices]
        errors[target] = max(
            float(np.abs(np.asarray(a) - np.asarray(b)).max() / max(float(np.abs(b).max()), 1e-30))
            for a, b in zip(leaves[0], leaves[-1], strict=True)
        )
    return errors


def digests_of_orders(settings: Settings, names: Sequence[str]) -> dict[str, str]:
    """Return a digest of loss and gradients of a bfloat16 GPT by family of orders."""
    import jax
    import numpy as np

    digests, gradients = {}, Gradients("models.gpt:GPT", jax.devices()[0], "bfloat16")
    for name in names:
        sha = hashlib.sha1(usedforsecurity=False)
        for leaf in jax.tree.leaves(gradients.under(name)):
            sha.update(np.ascontiguousarray(np.asarray(leaf, np.float32)).tobytes())
        digests[name] = sha.hexdigest()
    return digests


class Gradients:
    """Holds a model of four blocks cut into four stages, and gives its loss and gradients under any order."""

    def __init__(self, target: str, device: Any, dtype: str = "float32") -> None:
        from jaxpipe.stage.model.reference import init_params, resolve_model

        sizes = {"vocab_size": 64, "d_model": 64, "num_layers": 4, "num_heads": 2, "seq_len": 32}
        self._model = resolve_model(target, {**sizes, **_MODELS[target]})
        self._params = init_params(self._model, 0)
        self._device, self._dtype = device, dtype
        self._pipelines: dict[Any, Any] = {}

    def under(self, family: str) -> Any:
        """Return the loss and the gradients by layer. Orders that place stages alike share their compiled functions."""
        import jax.numpy as jnp
        import numpy as np

        from jaxpipe.runtime.pipeline import Pipeline
        from jaxpipe.schedule import generate

        # Two chunks on two ranks, or one on four: the stages are the same.
        schedule = next(s for s in (generate(family, p, 4) for p in (4, 2)) if s.num_stages == 4)
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
        rng = np.random.default_rng(0)
        batch = {
            name: rng.integers(0, 64, (4, *aval.shape)).astype(aval.dtype)
            if np.issubdtype(aval.dtype, np.integer)
            else np.ones((4, *aval.shape), aval.dtype)
            for name, aval in self._model.batch_spec(2).items()
        }
        pipe = pipe.with_schedule(schedule)
        return pipe.loss_and_grads(pipe.place(self._params), batch)


def attention_difference(settings: Settings) -> float:
    """Return the largest difference of F's outputs between attention kernels, ÷ the largest output, in bfloat16."""
    import jax.numpy as jnp

    from jaxpipe.cost.seconds import arguments_of

    outputs = []
    for kernel in ("auto", "xla"):
        forward = middle_block(settings, settings.hidden, attention=kernel).functions["F"]
        results = forward.call(*arguments_of(forward, settings.vocab))
        outputs.append(
            [x.astype(jnp.float32) for port, x in zip(forward.outputs, results, strict=True) if port.kind == "y"]
        )
    return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in zip(*outputs, strict=True))
