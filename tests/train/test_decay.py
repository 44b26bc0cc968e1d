"""Weight decay acts on matrices and embeddings, told by role: by the model's word or the leaf's name, not by its axes alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from hypothesis import given
from hypothesis import strategies as st

from jaxpipe.errors import CheckpointError
from jaxpipe.stage.model.layer import Layer, Matrix, Model
from jaxpipe.stage.model.params import named_leaves
from jaxpipe.stage.model.reference import init_params
from jaxpipe.train.checkpoint import load_params, read_manifest
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.update.optimizer import decay_mask, decay_remark, decayed, names_vector, optimizer_of
from models.clip import CLIP
from models.gpt import GPT
from models.llama import Llama
from models.vlm import VLM
from tests.support.checkpoint_cases import rewrite_manifest
from tests.support.train_runs import config, run, write_text

pytestmark = pytest.mark.usefixtures("one_build")

SMALL: dict[str, Any] = {"vocab_size": 16, "d_model": 8, "num_layers": 2, "num_heads": 2, "seq_len": 8}
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
MODELS: Mapping[str, Callable[[], Model]] = {
    "gpt": lambda: GPT(**SMALL),
    "llama with every bias": lambda: Llama(**SMALL, **BIASES, qk_norm=True, mlp_size=16),
    "clip": CLIP,
    "vlm": VLM,
}


def model_of(leaves: Mapping[str, Any], matrices: Mapping[Any, Matrix] | None = None) -> Model:
    """Return one layer of these leaves, and a loss."""
    shape = jax.ShapeDtypeStruct((1, 2), jnp.float32)
    inner = Layer("inner", lambda key: dict(leaves), lambda params, x, context: x, reads=("x",), matrices=matrices)
    loss = Layer("loss", lambda key: {}, lambda params, x, context: (0.0, 1.0))
    return Model("own", (inner, loss), lambda size: {"x": shape}, 0, 0)


def updates_of(model: Model, name: str, weight_decay: float) -> Any:
    """Return what the first step at full rate adds to parameters of 10 whose gradients are 1."""
    overrides = (f"optimizer.name={name}", f"optimizer.weight_decay={weight_decay}", "optimizer.lr=0.01")
    optimizer = optimizer_of(TrainConfig().override([*overrides, "optimizer.warmup_steps=0"]), model)
    params = jax.tree.map(lambda a: jnp.full(a.shape, 10.0), init_params(model, 0))
    grads = jax.tree.map(jnp.ones_like, params)
    return optimizer.update(grads, optimizer.init(params), params)[0]


@pytest.mark.parametrize(("kind", "name"), [("gpt", "adamw"), ("gpt", "muon"), ("llama with every bias", "lion")])
def test_no_bias_or_scale_of_ours_decays(kind: str, name: str) -> None:
    """Biases of 10 lost 0.05 a step at a rate of 0.01 and a decay of 0.5: GPT's qkv [3, H, K], Llama's qkv and gate_up."""
    model = MODELS[kind]()
    differ = jax.tree.map(lambda a, b: np.abs(a - b).max(), updates_of(model, name, 0.5), updates_of(model, name, 0.0))
    for path, change in named_leaves(differ):
        assert change == pytest.approx(0 if path[-1] in ("bias", "scale") else 0.05, abs=1e-4), path


@pytest.mark.parametrize("kind", MODELS)
def test_what_decays_of_ours(kind: str) -> None:
    model = MODELS[kind]()
    assert {path[-1] for _, path in decayed(model)} <= {"kernel", "embedding", "positions"}
    assert not any(path[-1] == "kernel" for _, path in decayed(model, "axes") - decayed(model))


class Stacked(linen.Module):
    """Three blocks in one scan: [3, …] of each parameter."""

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        class Block(linen.Module):
            @linen.compact
            def __call__(self, x: jax.Array, _: Any) -> tuple[jax.Array, None]:
                return linen.Dense(4)(linen.LayerNorm()(x)), None

        scanned = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return scanned()(x, None)[0]


@cache
def foreign_trees() -> Mapping[str, tuple[Any, set[str]]]:
    """Return parameters of Flax modules, and the last names of what decays."""
    x = jnp.ones((2, 3, 4))

    def init_params_of(module: linen.Module) -> Any:
        return module.init(jax.random.key(0), x)["params"]

    attention = nnx.to_pure_dict(nnx.state(nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0), decode=False), nnx.Param))
    return {
        "attention": (init_params_of(linen.MultiHeadDotProductAttention(2)), {"kernel"}),
        "general": (init_params_of(linen.DenseGeneral((2, 3))), {"kernel"}),
        "scanned": (init_params_of(Stacked()), {"kernel"}),
        "nnx attention": (attention, {"kernel"}),
        "by hand": ({"w1": jnp.ones((2, 3)), "b1": jnp.ones((2, 3)), "lora_b": jnp.ones((2, 2))}, {"w1", "lora_b"}),
        "torch's names": (
            {"norm_1": {"weight": jnp.ones((3, 4))}, "proj": {"weight": jnp.ones((3, 4)), "bias": jnp.ones((3, 4))}},
            {"weight"},
        ),
    }


@pytest.mark.parametrize("kind", ["attention", "general", "scanned", "nnx attention", "by hand", "torch's names"])
def test_biases_and_scales_of_other_models_do_not_decay(kind: str) -> None:
    leaves, names = foreign_trees()[kind]
    decayed_leaves = decayed(model_of(leaves))
    assert {path[-1] for _, path in decayed_leaves} == names
    assert ("inner", ("norm_1", "weight")) not in decayed_leaves


def test_a_layers_own_word_counts() -> None:
    leaves = {"bias": jnp.ones((2, 3)), "kernel": jnp.ones((2, 3))}
    assert decayed(model_of(leaves, {("bias",): Matrix()})) == {("inner", ("bias",)), ("inner", ("kernel",))}


_NAMES = st.sampled_from(["kernel", "w", "weight", "embedding", "bias", "scale", "b", "b2", "gamma", "ln_scale", "g"])
_TREES = st.dictionaries(_NAMES, st.lists(st.integers(1, 2), max_size=4).map(tuple), min_size=1, max_size=6)


@given(st.dictionaries(st.sampled_from(["norm", "dense", "layers_0"]), _TREES, min_size=1), st.booleans())
def test_roles_do_not_depend_on_stacking(shapes: Mapping[str, Mapping[str, tuple[int, ...]]], stack: bool) -> None:
    """Leaves that are no bias or scale by name decay from two axes on; a further axis in front makes no bias decay."""
    front = (3,) if stack else ()
    model = model_of(
        {a: {b: jnp.ones((*front, *shape)) for b, shape in leaves.items()} for a, leaves in shapes.items()}
    )
    mask = decay_mask(model)
    params = init_params(model, 0)
    for path, flag in named_leaves(mask(params)):
        axes = len(front) + len(shapes[path[1]][path[2]])
        assert flag == (axes >= 2 and not names_vector(path[1:])), path
        assert not (flag and path[-1] in ("bias", "scale", "b", "b2", "gamma", "ln_scale", "g"))
    assert mask({"inner": {}}) == {"inner": {}}


def test_one_line_says_what_decays() -> None:
    line = decay_remark(GPT(**SMALL), 0.1)
    assert (
        line == "weight decay 0.1 acts on 10 leaves, 1.73k parameters; not on bias, scale (18 leaves, 224 parameters)"
    )
    old = decay_remark(GPT(**SMALL), 0.1, "axes")
    assert old.startswith("weight decay 0.1 acts on 12 leaves") and old.endswith(": bias of 2 leaves decay too")


def test_it_is_a_mask_for_optax() -> None:
    model = GPT(**SMALL)
    optimizer = optax.adamw(1e-2, weight_decay=0.5, mask=decay_mask(model))
    params = init_params(model, 0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert not np.any(updates["block_00"]["qkv"]["bias"]) and np.any(updates["block_00"]["qkv"]["kernel"])


def test_a_resumed_run_keeps_the_rule_that_it_began_with(tmp_path: Path) -> None:
    """And a checkpoint from before the rule was kept went by the number of axes."""
    text = write_text(tmp_path / "a.txt")

    def go_on(name: str, steps: int) -> str:
        overrides = (
            "run.eval_every=0",
            "run.checkpoint_every=0",
            "optimizer.weight_decay=0.5",
            "run.output.keep_last=9",
        )
        return run(config(text, tmp_path / name, *overrides, f"run.steps={steps}"))[1]

    assert "weight decay 0.5 acts on 10 leaves" in go_on("new", 4)
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    rewrite_manifest(tmp_path / "old" / "checkpoints" / "00000004", lambda body: body["meta"].pop("decay"))
    assert "number of axes" not in go_on("new", 6)
    assert "; this run began when the number of axes decided what decays" in go_on("old", 6)
    rules = [read_manifest(tmp_path / name / "checkpoints", 6).meta["decay"] for name in ("new", "old")]
    assert rules == ["role", "axes"]
    new, old = (load_params(tmp_path / name, step=6)["block_00"] for name in ("new", "old"))
    assert not np.array_equal(new["qkv"]["bias"], old["qkv"]["bias"])
    rewrite_manifest(tmp_path / "new" / "checkpoints" / "00000006", lambda body: body["meta"].update(decay="colour"))
    with pytest.raises(CheckpointError, match="'colour'"):
        go_on("new", 8)
