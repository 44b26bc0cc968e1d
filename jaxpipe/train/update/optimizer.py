"""The optimizers of a config: AdamW, Lion and Muon, the rate of each step, which parameters decay, averaged parameters.

Clipping is not here: the norm is global over all ranks, and :mod:`jaxpipe.train.step` takes it.

Muon updates the matrices of a model, AdamW the rest. After Jordan et al., "Muon: An optimizer for hidden layers in neural
networks" (2024): of each matrix the momentum (Nesterov's) is brought near the orthogonal matrix next to it, by five steps of a
quintic Newton-Schulz iteration. The scale is that of Liu et al., "Muon is Scalable for LLM Training" (2025): ``0.2 · √max(rows,
columns)``, with which an update is as large as AdamW's, and one rate and one weight decay serve both. Differs from
``optax.contrib.muon``: parameters of more than two axes are folded to the matrices that the model says they are
(:class:`~jaxpipe.stage.model.layer.Matrix`), the momentum has no bias correction (orthogonal matrices have no scale), and the
rest gets AdamW, not NAdamW. Where a device holds a piece of a parameter (tp, ZeRO-1), its momentum is a piece too; for the
iteration the whole is gathered, and every device of the rank makes the same steps: a matrix more of memory and of traffic, and
no less time.

Weight decay acts on matrices and embeddings, neither on biases nor on the scales of norms. A parameter's role decides, never
its number of axes alone: biases of several heads have two axes, norm scales of stacked blocks too. A layer says which of its
leaves are matrices (:attr:`~jaxpipe.stage.model.layer.Layer.matrices`); any other leaf of at least two axes is one unless its
name is that of a bias, a scale or an offset. Runs whose checkpoints are older than that rule go by the number of axes, and keep
to it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.layer import Layer, Matrix, Model, Path, every_init_avals, init_avals, taken_by
from jaxpipe.stage.model.params import Place, is_trained, named_leaves
from jaxpipe.text import format_count
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.settings.sections import OptimizerConfig


def learning_rate(
    lr: float,
    warmup_steps: int,
    steps: int,
    min_lr_ratio: float,
    schedule: str = "cosine",
    decay_fraction: float = 0.2,
) -> optax.Schedule:
    """0 → ``lr`` over ``warmup_steps`` (the first step already moves), then to ``lr · min_lr_ratio`` at ``steps`` by a
    ``cosine`` or a line (``linear``), or not at all (``constant``). ``wsd``: constant, then a line over the last
    ``decay_fraction`` of all steps (Hu et al., "MiniCPM", 2024)."""
    rest = max(1, steps - warmup_steps)
    last = min(rest, max(1, round(decay_fraction * steps)))
    after: list[optax.Schedule] = {
        "cosine": [optax.cosine_decay_schedule(lr, rest, alpha=min_lr_ratio)],
        "linear": [optax.linear_schedule(lr, lr * min_lr_ratio, rest)],
        "constant": [optax.constant_schedule(lr)],
        "wsd": [optax.constant_schedule(lr), optax.linear_schedule(lr, lr * min_lr_ratio, last)],
    }[schedule]
    bounds = [steps - last] if len(after) > 1 else []
    if warmup_steps:
        after = [optax.linear_schedule(lr / warmup_steps, lr, max(1, warmup_steps - 1)), *after]
        bounds = [warmup_steps, *bounds]
    return optax.join_schedules(after, bounds) if bounds else after[0]


Mask = Callable[[Any], Any]
"""A function from a tree of parameters to the tree of whether each decays
(:func:`jaxpipe.train.update.optimizer.decay_mask`)."""


def adamw(
    schedule: optax.Schedule, *, betas: tuple[float, float], eps: float, weight_decay: float, mask: Mask
) -> optax.GradientTransformation:
    """AdamW, with weight decay where ``mask`` says."""
    return optax.adamw(schedule, b1=betas[0], b2=betas[1], eps=eps, weight_decay=weight_decay, mask=mask)


def lion(
    schedule: optax.Schedule, *, betas: tuple[float, float], weight_decay: float, mask: Mask
) -> optax.GradientTransformation:
    """Lion (Chen et al. 2023), with weight decay where ``mask`` says."""
    return optax.lion(schedule, b1=betas[0], b2=betas[1], weight_decay=weight_decay, mask=mask)


def functions_of(optimizer: Any, extra: Collection[str] = ()) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """``init`` of an optimizer, and its ``update``, which gets those of the ``extra`` arguments that it takes.

    Raises:
        ConfigError: one of these is missing, or an extra argument but ``value`` is not taken.
    """
    init, update = getattr(optimizer, "init", None), getattr(optimizer, "update", None)
    if not (callable(init) and callable(update)):
        raise ConfigError(
            f"the optimizer is a {type(optimizer).__name__} without init and update; want an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    parameters = inspect.signature(update).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = {name for name in extra if takes_any or name in parameters}
    if unknown := set(extra) - accepted - {"value"}:
        raise ConfigError(f"the optimizer's update takes no argument {min(unknown)!r}; leave it out of extra=")
    return init, lambda grads, state, params, **arguments: update(
        grads, state, params, **{name: value for name, value in arguments.items() if name in accepted}
    )


# -- averaged parameters ---------------------------------------------------------------------------------------------------


class EmaState(NamedTuple):
    """``inner``: of the optimizer. ``ema``: averaged parameters."""

    inner: Any
    ema: Any


def with_ema(optimizer: Any, decay: float) -> optax.GradientTransformationExtraArgs:
    """``optimizer`` with an exponential moving average of the parameters in its state: they themselves at first, then after
    each update ``decay · average + (1 - decay) · new``.

    Raises:
        ConfigError: ``decay`` is not between 0 and 1.
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"the decay of averaged parameters is {decay}; want 0 <= decay < 1, such as 0.999")
    start, _ = functions_of(optimizer)

    def init(params: Any) -> EmaState:
        return EmaState(start(params), params)

    def update(grads: Any, state: EmaState, params: Any, **extra: Any) -> tuple[Any, EmaState]:
        updates, inner = functions_of(optimizer, extra)[1](grads, state.inner, params, **extra)
        new = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p, state.ema, new)
        return updates, EmaState(inner, ema)

    return optax.GradientTransformationExtraArgs(init, update)


def ema_of(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the averaged parameters by layer, of optimizer state by layer
    (:meth:`jaxpipe.train.step.TrainStep.by_layer`): those that are
    trained.

    Raises:
        ConfigError: the optimizer keeps none.
    """
    averaged = {}
    for name, state in optimizer.items():
        ema_states = _nodes(state, lambda node: isinstance(node, EmaState))
        if not ema_states:
            raise ConfigError(
                f"the optimizer state of layer {name} holds no averaged parameters; make it with with_ema"
            )
        averaged[name] = ema_states[0].ema[name]
    return averaged


# -- the learning rate -----------------------------------------------------------------------------------------------------


def learning_rate_of(state: Any) -> jax.Array | None:
    """Return the hyperparameter ``learning_rate`` that ``optax.inject_hyperparams`` keeps in an optimizer's state; None where
    there is not exactly one."""
    rates = [n.hyperparams["learning_rate"] for n in _nodes(state, _injects) if "learning_rate" in n.hyperparams]
    return rates[0] if len(rates) == 1 else None


class LearningRate:
    """The learning rate of each step, as a device scalar: what was given, a number or a schedule of the count in the
    optimizer's ``state``, or else what :func:`learning_rate_of` finds there.

    Raises:
        ConfigError: something else was given; or a schedule, and the state keeps no count of a schedule.
    """

    def __init__(self, rate: float | optax.Schedule | None, state: Any) -> None:
        self._schedule = jax.jit(rate) if callable(rate) else None
        if not (rate is None or callable(rate) or isinstance(rate, float | int | np.number | np.ndarray | jax.Array)):
            raise ConfigError(f"learning_rate is {rate!r}; want a number, or a schedule of the step")
        self._number = None if rate is None or callable(rate) else jnp.asarray(rate, jnp.float32)
        if callable(rate) and not _nodes(state, _counts):
            raise ConfigError(
                "learning_rate is a schedule, and the optimizer's state counts for none; give the optimizer the schedule too, "
                "or leave learning_rate out"
            )

    def before(self, state: Any) -> jax.Array | None:
        """Return the rate of the update that ``state`` goes into, where it was given."""
        if self._schedule is None:
            return self._number
        rate: jax.Array = self._schedule(_nodes(state, _counts)[0].count)
        return rate

    def after(self, state: Any) -> jax.Array | None:
        """Return the rate of the update that ``state`` comes from, where the state tells; not one of its arrays."""
        rate = learning_rate_of(state)
        return None if rate is None else jnp.copy(rate)


def _injects(node: Any) -> bool:
    return isinstance(getattr(node, "hyperparams", None), Mapping)


def _counts(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _nodes(state: Any, matches: Callable[[Any], bool]) -> list[Any]:
    """Return the nodes of a pytree that are wanted, not looking into them."""
    return [node for node in jax.tree.leaves(state, is_leaf=matches) if matches(node)]


_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_STEPS, _EPS, _RMS = 5, 1e-7, 0.2
_Function = Callable[[jax.Array], jax.Array]
Applied = Callable[[Place, _Function, jax.Array], jax.Array]
"""``function`` of the whole leaf at a place, of a device's piece of it: the piece of the result."""


@dataclass(frozen=True, slots=True)
class Muon:
    """An optax transformation of ``{layer: leaves}``. ``matrices``: as :func:`matrices_of` finds them; ``rest``: the
    transformation of all other leaves; ``applied``: how devices that hold pieces orthogonalise."""

    rate: optax.Schedule
    matrices: Mapping[Place, Matrix]
    rest: optax.GradientTransformation
    momentum: float
    weight_decay: float
    applied: Applied = lambda place, function, leaf: function(leaf)

    def init(self, params: Any) -> Any:
        return self._both.init(params)

    def update(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates_and_state: tuple[Any, Any] = self._both.update(grads, state, params)
        return updates_and_state

    def on_pieces(self, applied: Applied) -> Muon:
        """Return the same on a device that holds pieces of leaves: what :mod:`jaxpipe.train.update.layerwise` need not
        check."""
        return replace(self, applied=applied)

    @property
    def _both(self) -> optax.GradientTransformation:
        muon = optax.chain(
            optax.trace(self.momentum, nesterov=True),
            optax.stateless(self._orthogonal),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(self.rate),
        )
        return optax.partition({"muon": muon, "adamw": self.rest}, self._labels)

    def _labels(self, params: Any) -> Any:
        labels = ["muon" if place in self.matrices else "adamw" for place, _ in _placed(params)]
        return jax.tree.unflatten(jax.tree.structure(params), labels)

    def _orthogonal(self, updates: Any, params: Any) -> Any:
        leaves = [self.applied(at, partial(orthogonal, self.matrices[at]), x) for at, x in _placed(updates)]
        return jax.tree.unflatten(jax.tree.structure(updates), leaves)


def orthogonal(matrix: Matrix, leaf: jax.Array) -> jax.Array:
    """Return the matrices of a leaf, each near the orthogonal one and scaled as the module says."""
    if matrix.split is None:
        return _folded(matrix, leaf)
    axis, sizes = matrix.split
    parts = jnp.split(leaf, np.cumsum(sizes)[:-1], axis)
    return jnp.concatenate([_folded(matrix, part) for part in parts], axis)


def _folded(matrix: Matrix, leaf: jax.Array) -> jax.Array:
    batch_axes = [k for k in range(leaf.ndim) if k not in (*matrix.rows, *matrix.columns)]
    order = (*batch_axes, *matrix.rows, *matrix.columns)
    rows, columns = (math.prod(leaf.shape[k] for k in axes) for axes in (matrix.rows, matrix.columns))
    moved = leaf.transpose(order)
    orthogonal_matrices = _newton_schulz(moved.reshape(-1, rows, columns)) * (_RMS * math.sqrt(max(rows, columns)))
    return orthogonal_matrices.reshape(moved.shape).transpose(np.argsort(order))


def _newton_schulz(x: jax.Array) -> jax.Array:
    """[n, rows, columns]: singular values brought to between 0.7 and 1.2."""
    if x.shape[1] > x.shape[2]:
        return _newton_schulz(x.mT).mT
    a, b, c = _COEFFICIENTS
    x = x / (jnp.sqrt(jnp.sum(x * x, (1, 2), keepdims=True)) + _EPS)
    for _ in range(_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def matrices_of(model: Model) -> dict[Place, Matrix]:
    """Return the parameters of ``model`` that are matrices: as its layers say, or, of a layer that says nothing, those of two
    axes, if it reads no batch array (embeddings do) and no loss takes from it (heads).

    Raises:
        ConfigError: what a layer says does not fit its parameters.
    """
    sources = taken_by(model.layers)
    ends = {*model.losses, *(k for loss in model.losses for k in sources[loss])}
    matrices: dict[Place, Matrix] = {}
    for number, layer in enumerate(model.layers):
        leaves = dict(named_leaves(init_avals(layer)))
        layer_matrices: Mapping[Path, Matrix] | None = layer.matrices
        if layer_matrices is None:
            inside = not layer.reads and number not in ends
            layer_matrices = {path: Matrix() for path, leaf in leaves.items() if inside and leaf.ndim == 2}
        for path, matrix in layer_matrices.items():
            if path not in leaves or not matrix.fits(leaves[path].shape):
                what = f"has the shape {list(leaves[path].shape)}" if path in leaves else "is none of its parameters"
                raise ConfigError(f"layer {layer.name} says that {'/'.join(path)} is {matrix}; it {what}")
            matrices[layer.name, path] = matrix
    if not matrices:
        raise ConfigError(
            f"optimizer.name=muon: no parameter of model {model.name} is a matrix; name some in Layer.matrices, or use adamw"
        )
    return matrices


def described(model: Model, matrices: Mapping[Place, Matrix]) -> str:
    """Return which leaves Muon updates and which AdamW, in a line. Layers that differ by a number only are told once, vectors
    not."""
    paths_by_kind: dict[bool, dict[str, None]] = {True: {}, False: {}}
    for layer in model.layers:
        name = re.sub(r"\d+$", "*", layer.name)
        for path, leaf in named_leaves(init_avals(layer)):
            if layer.trains(path) and leaf.ndim > 1:
                paths_by_kind[(layer.name, path) in matrices]["/".join((name, *path))] = None
    return f"Muon updates {', '.join(paths_by_kind[True])}; AdamW updates {', '.join([*paths_by_kind[False], 'all vectors'])}"


def _placed(tree: Any) -> list[tuple[Place, Any]]:
    return [((names[0], names[1:]), leaf) for names, leaf in named_leaves(tree)]


DecayRule = Literal["role", "axes"]
"""The rule that chooses parameters; ``axes``: those of two axes and more."""
DECAY_RULES: tuple[DecayRule, ...] = get_args(DecayRule)

_VECTORS = frozenset({"bias", "biases", "scale", "scales", "offset", "shift", "beta", "gamma", "gain"})
_LETTERS = frozenset({"b", "g"})  # whole names only: the b of lora_b is a matrix
_NORM = re.compile(r"(.*norm|ln)[\d_]*|ln_.*")


def decayed(model: Model, rule: DecayRule = "role") -> frozenset[Place]:
    """Return the trained parameters of ``model`` that weight decay acts on."""
    return frozenset(
        (layer.name, path)
        for layer, path, leaf in _trained(model)
        if _decays(layer.matrices or (), path, leaf.ndim, rule)
    )


def decay_mask(model: Model, rule: DecayRule = "role") -> Callable[[Any], Any]:
    """Return a function from a tree ``{layer: leaves}`` to the tree of whether each leaf decays: the ``mask`` of
    ``optax.adamw``."""
    places = decayed(model, rule)

    def mask(params: Any) -> Any:
        flags = [(names[0], names[1:]) in places for names, _ in named_leaves(params)]
        return jax.tree.unflatten(jax.tree.structure(params), flags)

    return mask


def decay_remark(model: Model, weight_decay: float, rule: DecayRule = "role") -> str:
    """Return what decays and what does not, in a line."""
    leaves = {(layer.name, path): leaf for layer, path, leaf in _trained(model)}
    places, by_role = decayed(model, rule), decayed(model)
    undecayed = leaves.keys() - places
    text = f"weight decay {weight_decay:g} acts on {_counted(leaves[at] for at in places)}"
    if undecayed:
        text += f"; not on {_names(path for _, path in undecayed)} ({_counted(leaves[at] for at in undecayed)})"
    if decayed_by_axes := places - by_role:
        text += (
            "; this run began when the number of axes decided what decays, and keeps to that: "
            f"{_names(path for _, path in decayed_by_axes)} of {len(decayed_by_axes)} leaves decay too"
        )
    return text


def names_vector(path: Path) -> bool:
    """Return whether the path of a leaf is that of a bias, or of a norm's scale or weight."""
    last = path[-1].lower()
    if last.rstrip("0123456789_") in _LETTERS or _VECTORS.intersection(re.split(r"[\d_.]+", last)):
        return True
    return last in ("w", "weight") and len(path) > 1 and _NORM.fullmatch(path[-2].lower()) is not None


def _decays(matrix_paths: Collection[Path], path: Path, axes: int, rule: DecayRule) -> bool:
    if rule == "axes":
        return axes >= 2
    return path in matrix_paths or (axes >= 2 and not names_vector(path))


def _trained(model: Model) -> Iterator[tuple[Layer, Path, Any]]:
    """Yield the leaves that are trained: their layer, the path there, the shape."""
    avals = every_init_avals(model.layers)
    for layer in model.layers:
        for path, leaf in named_leaves(avals[layer.name]):
            if is_trained(leaf) and layer.trains(path):
                yield layer, path, leaf


def _counted(leaves: Iterable[Any]) -> str:
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    return f"{len(sizes)} leaves, {format_count(sum(sizes))} parameters"


def _names(paths: Iterable[Path]) -> str:
    """Return the last names of these paths, each once."""
    return ", ".join(sorted({path[-1] for path in paths}))


def optimizer_of(config: TrainConfig, model: Model, decay: DecayRule = "role") -> Any:
    """Return the optax transformation that ``config`` describes, for ``model``. Its state is the same whatever decays.

    Raises:
        ConfigError: it is Muon, and the model has no matrices, or says wrongly which.
    """
    o, rate = config.optimizer, rate_of(config.optimizer, config.run.steps)
    options, mask = o.options, decay_mask(model, decay)
    if o.name == "lion":
        return lion(rate, betas=options.betas, weight_decay=o.weight_decay, mask=mask)
    rest = adamw(rate, betas=options.betas, eps=options.eps, weight_decay=o.weight_decay, mask=mask)
    return Muon(rate, matrices_of(model), rest, options.momentum, o.weight_decay) if o.name == "muon" else rest


def optimizer_remarks(config: TrainConfig, model: Model, decay: DecayRule = "role") -> Iterator[str]:
    """Yield what a user may not expect of the optimizer, in lines."""
    warmup, steps = config.optimizer.warmup_steps, config.run.steps
    if warmup > steps:
        yield f"optimizer.warmup_steps={warmup} is more than run.steps={steps}: the rate rises over all {steps} steps"
    if config.optimizer.name == "muon":
        yield described(model, matrices_of(model))
    if config.optimizer.weight_decay:
        yield decay_remark(model.stored, config.optimizer.weight_decay, decay)


def rate_of(o: OptimizerConfig, steps: int) -> optax.Schedule:
    """Return the learning rate of each update, of ``steps`` in all."""
    warmup, fall = min(o.warmup_steps, steps), o.options
    return learning_rate(o.lr, warmup, steps, fall.min_lr_ratio, fall.schedule, fall.decay_fraction)
