"""R23: what comes in and goes out by Python means what it says: roles of parameters for weight decay, dtypes at every door,
what a checkpoint of a Trainer says of its model, batches of ``jaxpipe.data``, and the way out by the verbs."""

from __future__ import annotations

import json
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torture_parts.trial import Bench, Case, FailedError, Trial, ask


def cases(bench: Bench) -> Iterator[Case]:
    """R23."""
    for kind, run, full, quick in (
        ("role of each parameter", _roles, 2000, 40),
        ("dtype at a door", _dtypes, 2000, 40),
        ("batches of jaxpipe.data", partial(_data, text=bench.text), 500, 10),
        ("target that a checkpoint keeps", _target, 200, 3),
        ("saved, then evaluated, sampled and exported", partial(_way_out, text=bench.text), 12, 1),
    ):
        for _ in range(bench.count(full, quick)):
            yield Case(kind, run)


_MATRICES = ("kernel", "w", "w1", "weight", "embedding", "positions", "lora_a", "lora_b", "up_proj", "qkv", "table")
_VECTORS = (
    "bias",
    "b",
    "b2",
    "scale",
    "beta",
    "gamma",
    "g",
    "qkv_bias",
    "ln_scale",
    "gain",
    "offset",
    "bias_1",
    "Bias",
)
_MODULES = ("dense", "attention", "layers_0", "Block_3", "mlp", "q")


def _roles(trial: Trial) -> None:
    """A tree whose parameters' roles are known beforehand, stacked over layers or not."""
    import jax
    import jax.numpy as jnp

    from jaxpipe.stage.model.layer import Layer, Matrix, Model
    from jaxpipe.stage.model.params import nested
    from jaxpipe.train.update.optimizer import decay_mask

    rng, leaves, expected = trial.rng, dict[Any, Any](), dict[Any, bool]()
    stacked = (2,) * rng.choice((0, 0, 1, 2))
    for k in range(rng.randint(1, 8)):
        matrix = rng.random() < 0.5
        path = (
            *(rng.choice(_MODULES) for _ in range(rng.randint(0, 2))),
            f"m{k}",
            rng.choice(_MATRICES if matrix else _VECTORS),
        )
        if not matrix and rng.random() < 0.2:
            path = (*path[:-1], rng.choice(("norm", "RMSNorm_0", "ln_1", "LayerNorm_2", "input_layernorm")), "weight")
        axes = rng.randint(1, 3)
        leaves[path] = jax.ShapeDtypeStruct((*stacked, *(1 for _ in range(axes))), jnp.float32)
        expected[path] = matrix and axes + len(stacked) >= 2
    roles = {path: Matrix() for path in leaves if rng.random() < 0.1} if rng.random() < 0.3 else None
    expected |= dict.fromkeys(roles or {}, True)
    tree = nested(leaves)
    inner = Layer(
        "inner",
        lambda key: jax.tree.map(lambda a: jnp.zeros(a.shape), tree),
        lambda p, x, c: x,
        matrices=roles,
        takes=(),
    )
    loss = Layer("loss", lambda key: {}, lambda p, x, c: (0.0, 1.0))
    model = Model("own", (inner, loss), lambda size: {}, 0, 0)
    decays = decay_mask(model)({"inner": tree})["inner"]
    for path, flag in expected.items():
        at: Any = decays
        for key in path:
            at = at[key]
        if at is not flag:
            raise FailedError(f"{'/'.join(path)} {leaves[path].shape}, said {roles}: decays {at}, should {flag}")


_DTYPES = (
    "float32", "bfloat16", "float16", "float64", "int8", "int32", "uint8", "bool", "complex64", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3b11fnuz", "float8_e3m4", "float4_e2m1fn", "int4", "uint4", "object", "str", "datetime64[s]", "float", "f4",
    "<f4", ">f4", "half", "fp8", "bf16", "", "float128", "longdouble", "S3", "key<fry>",
)  # fmt: skip


def _dtypes(trial: Trial) -> None:
    """Refused in one line, or one of the two that train without x64."""
    import jax.numpy as jnp

    from jaxpipe import Trainer
    from jaxpipe.errors import ConfigError
    from jaxpipe.interop.folder import DTYPES
    from jaxpipe.models.gpt import GPT
    from jaxpipe.stage.model.layer import check_dtype
    from jaxpipe.train.config import TrainConfig
    from jaxpipe.train.import_export import export_hub

    rng = trial.rng
    name = (
        rng.choice(_DTYPES) if rng.random() < 0.8 else "".join(rng.choices(string.ascii_letters + "0123456789_", k=6))
    )
    value: Any = name
    if rng.random() < 0.3:
        value = getattr(jnp, name, getattr(np, name, name))
    tiny = {"vocab_size": 4, "d_model": 4, "num_layers": 1, "num_heads": 1, "seq_len": 4}
    sizes: dict[str, Any] = {"ranks": 1, "microbatches": 1, "microbatch_size": 1}
    doors: dict[str, Callable[[], Any]] = {
        "check": lambda: check_dtype("dtype", value),
        "model": lambda: GPT(**tiny, dtype=name),
        "config": lambda: TrainConfig().override([f"run.dtype={name}"]),
        "export": lambda: export_hub(trial.folder / "none", trial.folder / "out", dtype=name),
        "trainer": lambda: Trainer(GPT(**tiny), optimizer=None, dtype=value, **sizes),  # type: ignore[arg-type]
    }
    trains = _same_kind(value, ("float32", "bfloat16"))
    for door, call in doors.items():
        fits = trains if door in ("check", "trainer") else name in ("float32", "bfloat16")
        fits = name in DTYPES if door == "export" else fits
        if door == "model":
            fits = _same_kind(name, ("float32", "bfloat16"))
        if fits and door in ("trainer", "export"):
            continue  # they would go on
        try:
            call()
        except ConfigError as error:
            if fits or "\n" in str(error):
                raise FailedError(f"{door} {value!r}: {error}") from None
        else:
            if not fits:
                raise FailedError(f"{door} takes {value!r}")


def _same_kind(value: Any, names: tuple[str, ...]) -> bool:
    import jax.numpy as jnp

    try:
        return jnp.dtype(value).name in names
    except (TypeError, ValueError, SyntaxError):
        return False


def _data(trial: Trial, text: Path) -> None:
    """The batches of a run with these settings, or one line."""
    import jaxpipe
    from jaxpipe.errors import ConfigError, DataError
    from jaxpipe.train.config import TrainConfig
    from jaxpipe.train.corpora.datasets import load_dataset

    rng = trial.rng
    settings: dict[str, Any] = {"path": str(text), "seq_len": rng.choice((1, 7, 8, 64, 10**7, 0))}
    if rng.random() < 0.5:
        settings["holdout"] = rng.choice((0.0, 0.01, 0.3, 0.5, 1.5))
    if rng.random() < 0.5:
        settings["seed"] = rng.choice((0, 3, 2**40, -1))
    if rng.random() < 0.3:
        settings["mask"] = rng.choice(("causal", "document", "none"))
    if rng.random() < 0.2:
        settings["tokenizer"] = rng.choice(("byte", "ids:300", "nowhere.json", "ids:x"))
    if rng.random() < 0.1:
        settings["sources"] = {"a": {"path": str(text)}}
    if rng.random() < 0.1:
        settings["".join(rng.choices(string.ascii_lowercase, k=5))] = 1
    batch, step = rng.choice((1, 4, 33, 10**6, 0)), rng.randrange(10**6)

    def by_function() -> Any:
        data = jaxpipe.data(batch=batch, **settings)
        return data.batch_at(step)

    def by_config() -> Any:
        config = TrainConfig.from_dict({"data": settings})
        if batch < 1:
            raise ConfigError("batch")
        return load_dataset(config).batches(config.data.reading.seed, batch, config.data.seq_len).batch_at(step)

    results: list[Any] = []
    for call in (by_function, by_config):
        try:
            results.append(call())
        except (ConfigError, DataError) as error:
            if "\n" in str(error):
                raise FailedError(f"{settings}: more than one line: {error}") from None
            results.append(type(error))
    if isinstance(results[0], dict) and isinstance(results[1], dict):
        same = results[0].keys() == results[1].keys() and all(
            np.array_equal(a, results[1][k]) for k, a in results[0].items()
        )
    else:
        same = results[0] is results[1]
    if not same:
        raise FailedError(f"{settings}, batch {batch}: {results}")


def _options(rng: random.Random, kind: str) -> dict[str, Any]:
    """Draw valid options of a small model."""
    heads = rng.choice((1, 2, 4))
    options: dict[str, Any] = {
        "vocab_size": rng.choice((256, 257, 300)),
        "d_model": 8 * heads,
        "num_layers": rng.randint(1, 3),
        "num_heads": heads,
        "seq_len": rng.choice((4, 8, 16)),
    }
    choices: dict[str, Any] = {
        "tied": (True, False),
        "norm_eps": (1e-5, 1e-6),
        "vocab_multiple": (1, 4),
        "max_seq_len": (None, 32),
    }
    if kind == "gpt":
        choices |= {"gelu": ("tanh", "exact"), "mlp_ratio": (1, 2)}
    else:
        choices |= {
            "qkv_bias": (True, False),
            "qk_norm": (True, False),
            "mlp_size": (8, None),
            "rope_theta": (10.0, 1e4),
        }
        choices |= {"num_kv_heads": (1, None), "window": (None, 3)}
    return options | {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.5}


def _target(trial: Trial) -> None:
    """Stored with the model that is trained, and not with a changed one; and makes it again."""
    from jaxpipe.models.gpt import GPT
    from jaxpipe.models.llama import Llama
    from jaxpipe.train.checkpoints.contents import strict_json
    from jaxpipe.train.checkpoints.which_model import known_origin, model_digest, stored_meta
    from jaxpipe.train.config import TrainConfig
    from jaxpipe.train.setup import build_model

    rng = trial.rng
    kind = rng.choice(("gpt", "llama"))
    model = (GPT if kind == "gpt" else Llama)(**_options(rng, kind))
    changed = rng.random() < 0.4
    if changed:
        at = rng.randrange(1, len(model.layers) - 1)
        layer = model.layers[at]
        other = replace(layer, apply=lambda params, x, context: 1.5 * layer.apply(params, x, context))
        model = replace(model, layers=(*model.layers[:at], other, *model.layers[at + 1 :]))
    origin = known_origin(model)
    if (origin is None) is not changed:
        raise FailedError(f"{kind} {model.options}, changed {changed}: origin {origin}")
    meta = strict_json(stored_meta(model, origin, None))
    if changed:
        if "model" in meta["config"]:
            raise FailedError(f"{kind}: a changed model is stored as {meta['config']['model']}")
        return
    config = TrainConfig.from_dict(meta["config"])
    again = build_model(config, model.vocab_size)
    if model_digest(again, training=False) != model_digest(model, training=False):
        raise FailedError(f"{kind} {model.options} comes back as {again.options}")


def _way_out(trial: Trial, text: Path) -> None:
    """A step, a save, and the three verbs; the loss of ``eval`` is the Trainer's."""
    import jax
    import optax

    import jaxpipe
    from jaxpipe.models.gpt import GPT
    from jaxpipe.models.llama import Llama

    rng = trial.rng
    kind, dtype = rng.choice(("gpt", "llama")), rng.choice(("float32", "float32", "bfloat16"))
    model = (GPT if kind == "gpt" else Llama)(**_options(rng, kind))
    data = jaxpipe.data(text, batch=4, seq_len=model.seq_len)
    sizes: dict[str, Any] = {"ranks": 1, "microbatches": 2, "microbatch_size": 2, "devices": jax.devices()[:1]}
    trainer = jaxpipe.Trainer(model, optimizer=optax.sgd(0.1), dtype=dtype, progress=None, compile_cache="off", **sizes)
    state, _ = trainer.step(trainer.init(), data.batch_at(0))
    run = trial.folder / "run"
    trainer.save(state, run, data=data)
    expected_loss = trainer.evaluate(state, data.held_out(4, 1)[0])["loss"]
    answer = ask(["eval", str(run), "--batch", "4", "--batches", "1", "--json"])
    if answer.code:
        raise FailedError(f"eval of {kind} {model.options}: {answer.err}")
    loss = json.loads(answer.out)["model"]["loss"]
    if abs(loss - expected_loss) > (1e-4 if dtype == "float32" else 5e-2) * expected_loss:
        raise FailedError(f"{kind} {model.options} {dtype}: eval {loss}, Trainer.evaluate {expected_loss}")
    for verb in (["generate", str(run), "--tokens", "2"], ["export", str(run), "-o", str(trial.folder / "hf")]):
        if (answer := ask(verb)).code and "transformers has no" not in answer.err:
            raise FailedError(f"{verb[0]} of {kind} {model.options}: {answer.err}")
