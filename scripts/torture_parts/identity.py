"""R22: whether it is the same model, which settings a resumed run learns by, and what was said of a run: over generated models,
settings, checkpoints and schedule files, each case in this process."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torture_parts.trial import Bench, Case, FailedError, Trial

_GOLDEN = Path(__file__).resolve().parents[2] / "tests" / "golden" / "checkpoint-0.1.0"
_SAME, _TRAINS, _OTHER = "SAME", "TRAINS_OTHERWISE", "OTHER"


def everything(bench: Bench) -> Iterator[Case]:
    """R22."""
    for kind, run, full, quick in (
        ("model changed", _model, 900, 25),
        ("rate at resume", _rate, 700, 40),
        ("poisoned checkpoint", _poisoned, 200, 15),
        ("sizes of a schedule file", _sizes, 200, 20),
    ):
        for _ in range(bench.count(full, quick)):
            yield Case(kind, run)


# -- models ----------------------------------------------------------------------------------------------------------------

_TRAIN_ONLY = ("backward", "train", "dropout")
_OPS = ("scale", "table", "callback", "method", "scan", "cond", "remat", "int", *_TRAIN_ONLY)
_Description = tuple[tuple[str, float], ...]


def _model(trial: Trial) -> None:
    """A model made again from the same description is the same; from another one it is not, and a change that only training
    sees is told from one that evaluation sees."""
    from jaxpipe.train.checkpoints.which_model import likeness, model_digest

    rng = trial.rng
    description = tuple((rng.choice(_OPS), _number(rng)) for _ in range(rng.randint(1, 4)))
    changed, expected = _changed(rng, description)
    before, after = model_digest(_made(description)), model_digest(_made(changed))
    verdict = likeness({"program": before}, after).name
    trial.tried[f"model: {expected}"] += 1
    if verdict != expected:
        raise FailedError(f"{verdict}, not {expected}: {description} → {changed}")
    if likeness({"program": before}, model_digest(_made(description))).name != _SAME:
        raise FailedError(f"not the same when made again: {description}")
    of_before = {name: before[name] for name in ("jax", "sha256")}
    by_name = likeness({"program": of_before}, after).name
    content = {op for (op, _), (new, _) in zip(description, changed, strict=False) if op == new} & {
        "callback",
        "method",
    }
    if by_name != (_OTHER if expected == _OTHER else _SAME) and not content:
        raise FailedError(f"an old digest says {by_name}: {description} → {changed}")


def _number(rng: random.Random) -> float:
    return rng.choice([rng.uniform(-3, 3), float(rng.randint(-4, 4)), -0.0, 1e-30, 0.5])


def _changed(rng: random.Random, description: _Description) -> tuple[_Description, str]:
    """Another description, and what it is to the first."""
    k = rng.randrange(len(description))
    op, number = description[k]
    way = rng.choice(["nothing", "number", "number", "number", "op", "more"])
    if way == "nothing":
        return description, _SAME
    if way == "number":
        other = _number(rng)
        if repr(other) == repr(number):
            return description, _SAME
        return (*description[:k], (op, other), *description[k + 1 :]), _TRAINS if op in _TRAIN_ONLY else _OTHER
    if way == "op":
        other_op = rng.choice([x for x in _OPS if x != op])
        both = {op, other_op} == {"train", "dropout"}  # a rule of one's own is a call, which evaluation makes, too
        return (*description[:k], (other_op, number), *description[k + 1 :]), _TRAINS if both else _OTHER
    new = rng.choice([x for x in _OPS if x not in _TRAIN_ONLY])
    return (*description, (new, _number(rng))), _OTHER


def _made(description: _Description) -> Any:
    import jax
    import jax.numpy as jnp

    from jaxpipe.stage.model.layer import Layer, Model

    layers = [
        Layer(
            f"layer{k}",
            lambda key: {"w": jnp.ones(2)},
            partial(_apply, op, number),
            reads=("x",) if not k else (),
            uses_key=op == "dropout",
        )
        for k, (op, number) in enumerate(description)
    ]
    loss = Layer("loss", lambda key: {}, lambda params, x, context: (jnp.sum(x * x), jnp.float32(x.size)))
    return Model("numbers", (*layers, loss), lambda n: {"x": jax.ShapeDtypeStruct((n, 2), jnp.float32)}, 1, 1)


class _Scaling:
    """Its method is called back; how often is not what it does."""

    def __init__(self, number: float) -> None:
        self.number, self.calls = number, 0

    def scaled(self, x: Any) -> Any:
        self.calls += 1
        return x * self.number


def _apply(op: str, number: float, params: Any, x: Any, context: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np

    x = context.data["x"] if x is None else x
    x = x * params["w"]
    if op in ("callback", "method"):
        function = (lambda y: y * np.float32(number)) if op == "callback" else _Scaling(number).scaled
        return x + jax.pure_callback(function, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.stop_gradient(x))
    if op == "dropout":
        return x * jax.random.bernoulli(context.key, 0.5, x.shape) * number if context.train else x
    if op == "train":
        return x * number + 1 if context.train else x
    if op == "backward":
        identity = jax.custom_vjp(lambda y: y)
        identity.defvjp(lambda y: (y, None), lambda _, g: (g * number,))
        return identity(x)
    if op == "table":
        return x + np.array([number, 1], np.float32)
    if op == "scan":
        return jax.lax.scan(lambda c, _: (c * number, None), x, None, 3)[0]
    if op == "cond":
        return jax.lax.cond(x.sum() > 0, lambda y: y * number, lambda y: y + 1, x)
    if op == "remat":
        return jax.checkpoint(lambda y: jnp.sin(y) * number)(x)
    if op == "int":
        return x + jnp.arange(2) * number
    return x * number


# -- the learning rate -----------------------------------------------------------------------------------------------------


def _rate(trial: Trial) -> None:
    """A remark has both rates of the next step, and is there if and only if they differ."""
    from jaxpipe.train.config import load_config
    from jaxpipe.train.run.resume import moved_rate

    rng = trial.rng
    old = _settings(rng)
    new = old | {key: value for key, value in _settings(rng).items() if rng.random() < 0.35}
    updates = rng.choice([0, rng.randint(0, old["run.steps"]), old["run.steps"]])
    stored, config = (load_config(None, [f"{k}={v}" for k, v in s.items()]) for s in (old, new))
    remark = moved_rate(stored.to_dict(), config, updates)
    before, after = _rate_at(old, updates), _rate_at(new, updates)
    off = abs(before - after) / max(before, after)
    trial.tried[f"rate {'moves' if off > 1e-4 else 'stays'}"] += 1
    if (off > 1e-4 and not remark) or (off < 1e-7 and remark):
        raise FailedError(f"{before:.8g} → {after:.8g} at update {updates}: {remark!r}: {old} → {new}")
    numbers = [float(x) for x in re.findall(r"(?:goes on at|was to be) ([\d.e+-]+\d)", remark)]
    if remark and not all(math.isclose(a, b, rel_tol=6e-4) for a, b in zip(numbers, (after, before), strict=True)):
        raise FailedError(f"{remark!r} for {before:.8g} → {after:.8g}: {old} → {new} at {updates}")
    absent = [k for k in old if f"{k} {stored.by_key()[k]}" in remark and stored.by_key()[k] == config.by_key()[k]]
    if absent:
        raise FailedError(f"{remark!r} names {absent[0]}, which is as it was")


def _settings(rng: random.Random) -> dict[str, Any]:
    return {
        "run.steps": rng.choice([1, 2, rng.randint(3, 60), rng.randint(60, 5000)]),
        "optimizer.lr": rng.choice([1e-3, 1e-2, round(rng.uniform(1e-5, 1), 6)]),
        "optimizer.warmup_steps": rng.choice([0, 1, 20, rng.randint(0, 100)]),
        "optimizer.options.schedule": rng.choice(["cosine", "wsd", "linear", "constant"]),
        "optimizer.options.min_lr_ratio": rng.choice([0.1, 0.05, 1.0, round(rng.uniform(0.01, 1), 3)]),
        "optimizer.options.decay_fraction": rng.choice([0.2, 1.0, round(rng.uniform(0.05, 1), 2)]),
    }


def _rate_at(settings: dict[str, Any], updates: int) -> float:
    """Return the rate after so many updates, from the guide's words alone."""
    steps, lr, warmup, schedule, least, fraction = settings.values()
    warmup = min(warmup, steps)
    if updates < warmup:
        return float(lr * (updates + 1) / warmup) if warmup > 1 else float(lr)
    if schedule == "constant":
        return float(lr)
    rest = max(1, steps - warmup)
    if schedule == "wsd":
        length = min(rest, max(1, round(fraction * steps)))
        progress = min(1.0, max(0.0, (updates - (steps - length)) / length))
        return float(lr * (1 - (1 - least) * progress))
    progress = min(1.0, (updates - warmup) / rest)
    if schedule == "linear":
        return float(lr * (1 - (1 - least) * progress))
    return float(lr * (least + (1 - least) * 0.5 * (1 + math.cos(math.pi * progress))))


# -- checkpoints that name code --------------------------------------------------------------------------------------------


def _poisoned(trial: Trial) -> None:
    """Whatever a checkpoint calls its model, data and their files, and whether or not it has digests: no door imports it."""
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.train.config import load_config
    from jaxpipe.train.evaluate import described
    from jaxpipe.train.import_export import completed

    rng, ran = trial.rng, trial.folder / "ran"
    name = f"poison{rng.randrange(10**9)}"
    package = trial.folder / name
    package.mkdir()
    for file in ("__init__.py", "gpt.py", "models.py"):
        (package / file).write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit(7)\n")
    module = rng.choice(
        [name, f"{name}.gpt", f"{name}.models", f"models.{name}", f"jaxpipe.models.{name}", f"jaxpipe.{name}"]
    )
    target = f"{module}:{rng.choice(['GPT', 'Model', 'hugging_face', '__import__'])}"
    run = trial.folder / "run"
    step = run / "checkpoints" / "00000004"
    source = sorted(p for p in _GOLDEN.rglob("checkpoint.json"))[-1].parent
    shutil.copytree(source, step)
    manifest = json.loads((step / "checkpoint.json").read_text())
    meta = manifest["meta"]
    meta.setdefault("config", {}).setdefault("model", {})["target"] = target
    meta["config"].setdefault("data", {})["path"] = target
    meta["sources"] = rng.choice([None, {"model": {"home": rng.choice(["jaxpipe.models", name, 3])}}, {"model": 1}, []])
    meta["program"] = rng.choice([None, {}, {"jax": "0"}, meta.get("program")])
    manifest["step"] = 4
    (step / "checkpoint.json").write_text(json.dumps(manifest))
    digest = hashlib.sha256((step / "checkpoint.json").read_bytes()).hexdigest()
    sums = (step / "SHA256SUMS").read_text()
    (step / "SHA256SUMS").write_text(re.sub(r"[0-9a-f]{64}(?=  checkpoint\.json\n)", digest, sums))
    sys.path.insert(0, str(trial.folder))
    importlib.invalidate_caches()
    doors: dict[str, Callable[[], object]] = {
        "eval": lambda: described(step),
        "init_from": lambda: completed(load_config(None, [f"run.init_from={run}"])),
        "resume": lambda: completed(load_config(None, [f"run.init_from={run}", f"run.out_dir={run}"]), meta),
    }
    try:
        for door, enter in doors.items():
            try:
                enter()
            except JaxpipeError:
                continue
            except BaseException as error:
                raise FailedError(f"{door}: {type(error).__name__} ({error}): {target}") from error
            raise FailedError(f"{door} takes {target}")
    finally:
        sys.path.remove(str(trial.folder))
    if ran.exists() or any(imported.startswith(name) for imported in sys.modules):
        raise FailedError(f"{target} was imported")


# -- what was said ---------------------------------------------------------------------------------------------------------


def _sizes(trial: Trial) -> None:
    """Ranks, microbatches and chunks that a config does not say are those of its schedule file; what it says stays, though it
    be the default."""
    from jaxpipe.schedule import generate, write_schedule
    from jaxpipe.train.config import load_config

    rng = trial.rng
    family, ranks, chunks = rng.choice(
        [("1f1b", rng.randint(1, 5), 1), ("v-zb", rng.randint(2, 4), 2), ("gpipe", 4, 1)]
    )
    schedule = generate(family, ranks, rng.randint(ranks, 12))
    path = trial.folder / f"mine.{rng.choice(['sched', 'json', 'csv'])}"
    write_schedule(schedule, path)
    sizes = {"ranks": ranks, "microbatches": schedule.num_microbatches, "chunks": chunks}
    overrides = {
        name: rng.choice([n, default])
        for (name, n), default in zip(sizes.items(), (4, 8, 1), strict=True)
        if rng.random() < 0.4
    }
    microbatches = overrides.get("microbatches", sizes["microbatches"])
    lines = [f"pipeline.{name}={n}" for name, n in overrides.items()]
    config = load_config(None, [f"pipeline.schedule={path}", f"run.batch={2 * microbatches}", *lines])
    actual = {name: getattr(config.pipeline, name) for name in sizes}
    if actual != sizes | overrides:
        raise FailedError(f"{actual} of a file with {sizes}, said {overrides}")
    if {name for name in sizes if config.says(f"pipeline.{name}")} != overrides.keys():
        raise FailedError(f"says {config.given_keys}, and {overrides} were said")
