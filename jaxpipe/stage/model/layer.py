"""The layer protocol: a pure pair ``init``, ``apply`` over plain dict pytrees; and the options of a model.

A model is a list of layers; a stage is a run of consecutive layers. A layer takes the result of the one before it, or those of
the earlier layers that it names: layers form a graph, listed in an order in which they can run. What flows between layers is
any pytree: floating-point leaves carry gradients, integer leaves and non-array leaves (a Python int, a string) travel along
without. Data from outside (tokens, labels, masks) enters at any layer that names it in ``reads``: labels reach the last stage
this way and never cross the pipeline. Adapters for Flax modules are in :mod:`jaxpipe.stage.model.adapters`.

**Options** are frozen dataclasses made from plain mappings: names checked with suggestions, types checked, one line an error.
Models take their options this way (``GPT(**options)``), so that a configuration file's ``[model.options]`` table and a Python
call get the same messages. It handles int, float, bool, str and ``X | None`` fields and option dataclasses inside one another,
which is what a model needs; other tables belong to :mod:`jaxpipe.train.config`.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe._jax_compat import is_key_dtype
from jaxpipe.axes import ONE_SHARD, BufferKind, RankMesh
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.stage.identity import function_key
from jaxpipe.text import closest, divisors_of

Params = dict[str, Any]
Path = tuple[str, ...]
Shard = int | Literal["partial"] | tuple[BufferKind, int | None]
"""How a parameter lies on the ``tp`` shards: split along an axis, or (``"partial"``) whole on each of them, each shard making
a part of its gradient. Or one of the other kinds of :data:`~jaxpipe.axes.BUFFER_AXES`, and the axis that is divided or None. A
parameter of which nothing is said is whole on each, and each shard makes its whole gradient."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """The axes along which a parameter is a matrix, or several. ``rows``: the axes that the product with it sums over;
    ``columns``: those of the result. Along any other axis it is a matrix at each index. ``split``: an axis and sizes along it;
    each part is a matrix of its own, as queries, keys and values are that one product makes."""

    rows: tuple[int, ...] = (0,)
    columns: tuple[int, ...] = (1,)
    split: tuple[int, tuple[int, ...]] | None = None

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape can be such a matrix."""
        axes = (*self.rows, *self.columns)
        is_matrix = self.rows and self.columns and len(set(axes)) == len(axes) and set(axes) <= set(range(len(shape)))
        if self.split is None or not is_matrix:
            return bool(is_matrix)
        axis, sizes = self.split
        return axis in range(len(shape)) and sum(sizes) == shape[axis] and min(sizes) > 0


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Everything that a layer may see besides its parameters and input.

    ``data``: the batch arrays named in :attr:`Layer.reads`, this microbatch's shard. ``key``: a PRNG key unique to (step,
    microbatch, layer), or None when the layer does not ask for one or in evaluation. ``train``: False in evaluation.
    ``tp``: how the work is divided over shards of parameters and of sequences; outside a pipeline there is one. With several,
    ``apply`` runs once a shard, inside ``shard_map``, and gets its own shard of each parameter.
    """

    data: Mapping[str, jax.Array]
    key: jax.Array | None = None
    train: bool = True
    tp: RankMesh = ONE_SHARD


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class With:
    """Holds ``y`` and what a layer returns beside it, which goes to no other layer: returned by :attr:`Layer.apply`.

    ``losses``: by each name of :attr:`Layer.losses`, ``(sum, weight)`` of this microbatch, two scalars as a model's loss
    returns them; the batch alone decides the weight. ``sums``: by name, arrays that are added up over a step, without gradient;
    integers stay integers. ``peaks``: arrays of which a step keeps the largest of each element.

    Each shard of the data (dp, cp) returns what its own positions make, shards over tp all the same. Evaluation drops
    everything but ``y``.
    """

    y: Any
    losses: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    sums: Mapping[str, Any] = field(default_factory=dict)
    peaks: Mapping[str, Any] = field(default_factory=dict)


def split_result(result: Any) -> With:
    """Return what a layer returned, with ``y`` apart from the rest."""
    return result if isinstance(result, With) else With(result)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer.

    ``name``: unique in the model; parameters are stored and checkpointed under it. ``init(key) -> params`` (a dict pytree of
    arrays, float32 master precision). ``apply(params, x, context) -> y``, or :class:`With` more than that. ``takes``: whose
    results ``x`` is. None: that of the layer before it (the first layer gets None). Names of earlier layers: a tuple of their
    results, one name too. ``()``: None; the layer begins a branch with what it reads. ``reads``: names of batch arrays it
    needs. ``uses_key``: it draws random numbers in training (dropout). ``tied``: ``{path in this layer's params: (owner layer,
    path there)}``; a tied leaf is not created by ``init`` but put into ``params`` before ``apply``; its gradient is added to
    the owner's. ``kind``: what sort of layer it is, for people; nothing is computed, shared or timed by it.

    ``trainable(path)``: whether the floating-point leaf at that path is trained; None: all are. One that is not has no
    gradient, no W, no accumulator and no optimizer state. ``frozen``: no leaf is, whatever ``trainable`` says; where no layer
    that it takes from, however far back, is trained either, it has no backward pass. ``float32(path)``: whether it stays
    float32 where the others are computed with in a narrower dtype; None: none does. Neither is asked about tied leaves: those
    are as their owner's.

    ``span``: of a loss, of how many consecutive microbatches it gets the rows at once, one after another: other numbers are
    another loss where rows count for each other. With several dp shards each has groups of its own rows.

    ``detached``: what it takes gets no gradient from it, and nothing waits for its backward. ``words``: how it is divided by
    words over the ranks of a pipeline (vocabulary-parallel); None: it can't be. ``alike``: equal for layers that do the same to
    other rows.

    ``matrices``: the leaves that are matrices, for optimizers that treat those apart (Muon); None: those of two axes are,
    unless the layer reads batch arrays, as embeddings do, or a loss takes from it, as from heads.

    ``losses``: those that ``apply`` returns beside ``y`` (:attr:`With.losses`), with the factor of each. One name in several
    layers is one loss: a step minimises the model's own loss plus each factor · Σ sum / Σ weight over these layers and all
    microbatches. Logs have the model's loss alone, and Σ sum / Σ weight as a metric of that name, without the factor.

    ``after_step(leaves, sums) -> leaves``: new values of leaves that are not trained, after each step that changes parameters;
    it is traced. ``leaves``: those that it returns; ``sums``: :attr:`With.sums` and ``peaks`` of the layer over the step.
    Leaves that it returns are whole on each device, and in the dtype of masters (:attr:`float32`).
    ``judge(sums) -> str``: on the host, after each step of a run: a text ends the run (exit code 7), "" goes on.

    ``experts``: the leaves that hold one expert after another along axis 0, with the number of experts that a position is sent
    to; predictions read it.

    ``shards(tp)``: how the parameters lie on tensor-parallel shards, by path, tied leaves included; it raises ConfigError, with
    the numbers that would work, where the layer can't be divided so. None: the layer knows no tensor parallelism.
    """

    name: str
    init: Callable[[jax.Array], Params]
    apply: Callable[[Params, Any, LayerContext], Any]
    reads: tuple[str, ...] = ()
    uses_key: bool = False
    tied: Mapping[Path, tuple[str, Path]] = field(default_factory=dict)
    kind: str = ""
    shards: Callable[[RankMesh], Mapping[Path, Shard]] | None = None
    trainable: Callable[[Path], bool] | None = None
    float32: Callable[[Path], bool] | None = None
    takes: tuple[str, ...] | None = None
    frozen: bool = False
    span: int = 1
    matrices: Mapping[Path, Matrix] | None = None
    detached: bool = False
    words: VocabSplit | None = None
    alike: Hashable = None
    losses: Mapping[str, float] = field(default_factory=dict)
    after_step: Callable[[Params, Mapping[str, jax.Array]], Params] | None = None
    judge: Callable[[Mapping[str, np.ndarray]], str] | None = None
    experts: Mapping[Path, int] = field(default_factory=dict)

    @property
    def code(self) -> Hashable:
        """Return a key of the layer's program, equal for layers that make, compute, read, tie and train the same: their
        functions are the same objects; or they say that they are ``alike``."""
        if self.alike is not None:
            return self.alike
        functions = (function_key(self.init), function_key(self.apply))
        rules = (self.trainable, self.float32, self.frozen, self.span, self.detached, tuple(self.losses))
        return functions, self.reads, self.uses_key, tuple(sorted(self.tied.items())), rules

    def trains(self, path: Path) -> bool:
        """Whether a floating-point leaf that the layer creates is trained."""
        return not self.frozen and (self.trainable is None or bool(self.trainable(path)))

    def stays_float32(self, path: Path) -> bool:
        """Whether a floating-point leaf that the layer creates is computed with in float32."""
        return self.float32 is not None and bool(self.float32(path))


@dataclass(frozen=True, slots=True)
class VocabSplit:
    """The division of an embedding, a head or the loss behind it by words (:mod:`jaxpipe.stage.model.vocabulary`).

    ``path``: of the leaf [V, D] with a row for each word, split over ``tp`` along that axis or not; ``()``: a loss has none,
    and no parts. ``part(first, barriers)``: ``apply`` of the part whose rows are those of the words from ``first`` on; it
    reads ``reads``. ``rest(barriers)``: the layer without these rows. That of an embedding takes the results of its parts, as a
    tuple; the parts of a head take that of its rest; the loss takes theirs, and with one barrier first what they took.
    """

    path: Path
    part: Callable[[int, int], Callable[[Params, Any, LayerContext], Any]]
    rest: Callable[[int], Layer]
    reads: tuple[str, ...] = ()


JoinRows = Callable[[Mapping[int, Any], int, int, int], Any]
"""Makes a leaf of the rows of its parts, by number, as far as they are here; then come the numbers of rows of a part and of the
leaf, and that of parts."""


@dataclass(frozen=True, slots=True, repr=False)
class Model:
    """Layers in an order in which they can run (:attr:`Layer.takes`). The last one is the loss: it reads the labels and returns
    ``(loss_sum, weight_sum)``, two float32 scalars of this microbatch; the step's loss is Σ loss_sum / Σ weight_sum. It may
    return a third value, metrics by name: a scalar sum, reported as Σ sum / Σ weight_sum, or a pair ``(sum, weight)`` of its
    own; they carry no gradient. What it takes is the model's output (logits ``[batch, sequence, vocabulary]``, which generation
    uses).

    Every layer that no other takes is such a loss. Of several, the step's loss is the sum of Σ loss_sum / Σ weight_sum, each
    over all microbatches: the weights of one are not mixed with another's. Each is reported under its layer's name too.

    ``batch_spec(microbatch_size)`` gives the arrays of a microbatch by name (the model's sequence length is its own).
    ``loss_unit``: what the loss is in, and per what its weights count. ``over_time``: the batch arrays whose axis 1 is time, of
    a model that can have it divided (``LayerContext.tp.cp``): its layers work on each position alone, or ask
    :mod:`jaxpipe.context_parallel` for the others. Empty: it can't. ``target``, ``options``: the function
    (``module:attribute``) and its keyword arguments, JSON values, that make this model; empty where that is not known.
    """

    name: str
    layers: tuple[Layer, ...]
    batch_spec: Callable[[int], Mapping[str, jax.ShapeDtypeStruct]]
    vocab_size: int
    seq_len: int
    loss_unit: str = field(default="nats/token", kw_only=True)
    over_time: tuple[str, ...] = field(default=(), kw_only=True)
    target: str = field(default="", kw_only=True, compare=False)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True, compare=False)

    def __post_init__(self) -> None:
        """Raise StageError when layer names clash, a read names no batch array, a tie has no proper owner, or a layer takes
        what is no earlier layer."""
        problems = _model_problems(self)
        if problems:
            raise StageError(f"model {self.name}: " + "; ".join(problems))

    def __repr__(self) -> str:
        """Return a form such as ``Model('gpt', 15 layers: embed, block_00, …, head, loss)``."""
        names = [layer.name for layer in self.layers]
        shown = names if len(names) <= 6 else [*names[:2], "…", *names[-2:]]
        return f"{type(self).__name__}({self.name!r}, {len(names)} layers: {', '.join(shown)})"

    @property
    def stored(self) -> Model:
        """Return the model that a checkpoint is of: this one, unless it is vocabulary-parallel."""
        return self

    @property
    def first(self) -> int:
        """Return the number that random keys count the first layer by (:func:`~jaxpipe.stage.split.trace.layer_key`)."""
        return 0

    def divided(self, params: Mapping[str, Params]) -> Mapping[str, Params]:
        """Divide parameters of :attr:`stored` by layer into those of this model's layers."""
        return params

    def divided_state(self, states: Mapping[str, Any]) -> Mapping[str, Any]:
        """Divide optimizer states by layer as :meth:`divided` divides parameters."""
        return states

    def joined(self, trees: Mapping[str, Any], join_rows: JoinRows | None = None) -> dict[str, Any]:
        """Join parameters or optimizer states of this model's layers into those of :attr:`stored`. ``join_rows``: given where
        only some of the layers are here."""
        return dict(trees)

    def stored_layer(self, name: str) -> str:
        """Return the layer of :attr:`stored` that the layer ``name`` is, or is a part of."""
        return name

    @property
    def span(self) -> int:
        """Return how many consecutive microbatches its loss takes at once (:attr:`Layer.span`)."""
        return self.layers[-1].span

    @property
    def layer_losses(self) -> dict[str, float]:
        """Return the losses that layers have beside the model's own, with their factors (:attr:`Layer.losses`)."""
        return {name: factor for layer in self.layers for name, factor in layer.losses.items()}

    @property
    def losses(self) -> tuple[int, ...]:
        """Return the positions of the losses: layers that no other takes."""
        taken_positions = {k for sources in taken_by(self.layers) for k in sources}
        return tuple(i for i in range(len(self.layers)) if i not in taken_positions)


def taken_by(layers: Sequence[Layer]) -> tuple[tuple[int, ...], ...]:
    """Return, for each layer of a model, the positions of those whose results it takes, as :attr:`Layer.takes` lists them."""
    at = {layer.name: i for i, layer in enumerate(layers)}
    return tuple(
        ((i - 1,) if i else ()) if layer.takes is None else tuple(at[name] for name in layer.takes)
        for i, layer in enumerate(layers)
    )


def given_to(layer: Layer, results: Sequence[Any]) -> Any:
    """Return the input ``x`` of ``apply`` out of the results of the layers that ``layer`` takes."""
    if layer.takes is None:
        return results[0] if results else None
    return tuple(results) if layer.takes else None


LeafRule = Callable[[str, Path], bool]
"""A test of a layer's name and a path in its parameters."""


@dataclass(frozen=True, slots=True)
class _OneOf:
    """A rule for a layer's leaves that is equal to others for the same paths, so that layers with equal rules share
    programs."""

    paths: frozenset[Path]

    def __call__(self, path: Path) -> bool:
        return path in self.paths


def with_leaf_rules(model: Model, *, trainable: LeafRule | None = None, float32: LeafRule | None = None) -> Model:
    """Set :attr:`Layer.trainable` and :attr:`Layer.float32` of a model's layers by these rules; None leaves them as they are.
    Of a layer with :attr:`Layer.after_step`, leaves that it does not train stay so, and float32 where they are.

    Raises:
        StageError: ``trainable`` picks no leaf or every leaf, or ``float32`` picks none: then it says nothing.
    """
    paths = {layer.name: leaf_paths(layer) for layer in model.layers}
    leaves = [(name, path) for name, layer_paths in paths.items() for path in layer_paths]

    def picked(what: str, rule: LeafRule, most: int) -> dict[str, _OneOf]:
        rules_of_layer = {
            name: _OneOf(frozenset(p for p in layer_paths if rule(name, p))) for name, layer_paths in paths.items()
        }
        count = sum(len(f.paths) for f in rules_of_layer.values())
        if not 0 < count <= most:
            example = f", such as {leaves[0]}" if leaves else ""
            raise StageError(
                f"{what} picks {'every one' if count else 'none'} of the {len(leaves)} parameters of model {model.name}; it is "
                f"called with a layer's name and a path in it{example}"
            )
        return rules_of_layer

    rules: dict[str, dict[str, _OneOf]] = {}
    if trainable is not None:
        rules["trainable"] = picked("trainable", trainable, len(leaves) - 1)
    if float32 is not None:
        rules["float32"] = picked("float32", float32, len(leaves))
    for layer in model.layers if rules else ():
        unlearned = {p for p in paths[layer.name] if layer.after_step is not None and not layer.trains(p)}
        wide = {p for p in unlearned if layer.stays_float32(p)}
        for what, leaf_rules in rules.items():
            chosen = leaf_rules[layer.name].paths
            leaf_rules[layer.name] = _OneOf(chosen - unlearned if what == "trainable" else chosen | wide)
    layers = [replace(layer, **{k: v[layer.name] for k, v in rules.items()}) for layer in model.layers]  # type: ignore[arg-type]
    return replace(model, layers=tuple(layers))


def leaf_paths(layer: Layer) -> tuple[Path, ...]:
    """Return the paths of the floating-point leaves that ``layer`` creates."""
    leaves = jax.tree_util.tree_leaves_with_path(init_avals(layer))
    floats = [keys for keys, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return tuple(tuple(str(getattr(k, "key", k)) for k in keys) for keys in floats)


def key_aval() -> Any:
    """Return the type of a PRNG key."""
    # By the implementation that is set now: a cached type would outlive a change of the setting.
    return _key_aval(jax.config.jax_default_prng_impl)  # type: ignore[attr-defined,unused-ignore]


def typed_key(key: jax.Array) -> jax.Array:
    """Return ``key`` as a typed PRNG key; raw ``uint32`` keys are wrapped."""
    return key if is_key_dtype(key.dtype) else jax.random.wrap_key_data(key)


@cache
def _key_aval(implementation: str) -> Any:
    return jax.eval_shape(lambda: jax.random.key(0, impl=implementation))


def init_avals(layer: Layer) -> Any:
    """Return shapes and dtypes of what ``init`` makes, without making it.

    Raises:
        StageError: it makes something else than a dict.
    """
    avals = jax.eval_shape(layer.init, key_aval())
    if not isinstance(avals, Mapping):
        what = "an array" if isinstance(avals, jax.ShapeDtypeStruct) else f"a {type(avals).__name__}"
        raise StageError(f"layer {layer.name!r}: init returns {what}; want a dict of arrays, such as {{'kernel': …}}")
    return avals


def every_init_avals(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return :func:`init_avals` of each layer by name; layers that are alike or have the same ``init`` are looked at
    once."""
    avals_of: dict[Hashable, Any] = {}
    avals_by_layer = {}
    for layer in layers:
        key = function_key(layer.init) if layer.alike is None else layer.alike
        if key not in avals_of:
            avals_of[key] = init_avals(layer)
        avals_by_layer[layer.name] = avals_of[key]
    return avals_by_layer


def _model_problems(model: Model) -> list[str]:
    """List what is wrong with a model's list of layers, a phrase each."""
    by_name = {layer.name: layer for layer in model.layers}
    arrays = model.batch_spec(1)
    problems = []
    if len(model.layers) < 2:
        problems.append(f"{len(model.layers)} layers; the least is 2, one that returns logits and the loss")
    # Parameters, checkpoints and ties go by name.
    if len(by_name) < len(model.layers):
        names = [layer.name for layer in model.layers]
        twice = sorted({name for name in names if names.count(name) > 1})
        problems.append(f"layer names must be unique, and {', '.join(twice)} appears more than once")
    factors = model.layer_losses
    for i, layer in enumerate(model.layers):
        problems += [
            f"layer {layer.name} counts its loss {name!r} by {factor}, another layer by {factors[name]}; a name has one factor"
            for name, factor in layer.losses.items()
            if factor != factors[name]
        ]
        problems += _taking_problems(layer, [earlier.name for earlier in model.layers[:i]], by_name)
        problems += [
            f"layer {layer.name} reads {name!r}, and the batch has {', '.join(arrays)}"
            for name in layer.reads
            if name not in arrays
        ]
        for path, (owner, owner_path) in layer.tied.items():
            tie = f"layer {layer.name} ties {'/'.join(path)} to {owner}/{'/'.join(owner_path)}"
            if owner not in by_name or owner == layer.name:
                candidates = ", ".join(name for name in by_name if name != layer.name)
                problems.append(f"{tie}; the owner must be another layer: {candidates}")
            elif owner_path in by_name[owner].tied:
                true_owner, true_path = by_name[owner].tied[owner_path]
                problems.append(f"{tie}, itself tied; name its owner {true_owner}/{'/'.join(true_path)} instead")
    return problems or list(_span_problems(model))


def _span_problems(model: Model) -> Iterator[str]:
    for i, layer in enumerate(model.layers):
        if type(layer.span) is not int or layer.span < 1:
            yield f"layer {layer.name} has span {layer.span!r}; want a whole number of at least 1"
        elif layer.span > 1 and model.losses != (i,):
            yield f"layer {layer.name} has span {layer.span}; only a model's one loss can take several microbatches at once"


def _taking_problems(layer: Layer, earlier: Sequence[str], by_name: Mapping[str, Layer]) -> Iterator[str]:
    if isinstance(layer.takes, str):
        yield f"layer {layer.name} takes {layer.takes!r}; want a tuple of names: ({layer.takes!r},)"
        return
    for name in layer.takes or ():
        if name == layer.name:
            yield f"layer {name} takes its own result"
        elif name in by_name and name not in earlier:
            yield f"layer {layer.name} takes {name!r}, which comes after it; list layers in an order in which they can run"
        elif name not in earlier:
            yield f"layer {layer.name} takes {name!r}; layers before it are {', '.join(earlier) or 'none'}"


def mode_keyword(call: Callable[..., Any]) -> Callable[[bool], dict[str, bool]]:
    """Find how to tell ``call`` whether it trains: return a function from ``train`` to keyword arguments."""
    # The spellings in use among Flax modules.
    names = inspect.signature(call).parameters
    for name, sign in (("train", True), ("training", True), ("deterministic", False)):
        if name in names:
            return lambda train: {name: train is sign}
    return lambda train: {}


# -- options of a model ------------------------------------------------------------------------------------------------

T = TypeVar("T")


def build_options(cls: type[T], options: Mapping[str, Any], what: str) -> T:
    """``cls(**options)`` for an option dataclass ``cls``; ``what`` names it in messages (``"models.gpt:GPT"``).

    Raises ConfigError when an option is unknown (with the nearest name), missing, or of the wrong type. Checks of values are
    the dataclass's own, in its ``__post_init__``. An int is accepted where a float is wanted.
    """
    table = {f.name: f.default is MISSING and f.default_factory is MISSING for f in fields(cls)}  # type: ignore[arg-type]
    check_names(what, options, table)
    hints = typing.get_type_hints(cls)
    return cls(**{name: _typed(value, hints[name], f"{what}: {name}") for name, value in options.items()})


def options_of(config: Any) -> dict[str, Any]:
    """The options that :func:`build_options` makes an equal ``config`` of, as values that TOML and JSON can hold: all of them,
    so that later defaults change nothing, but those that are None, as they are by default."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    nested = {name: options_of(value) if is_dataclass(value) else value for name, value in values.items()}
    return {name: value for name, value in nested.items() if value is not None}


def check_names(what: str, options: Iterable[str], required: Mapping[str, bool]) -> None:
    """Raise ConfigError, with the nearest name that exists, unless ``options`` are among the names in ``required``, and all
    that are needed are there."""
    options = list(options)
    for name in options:
        if name not in required:
            raise ConfigError(f"{what} has no option {name!r}{suggestion(name, required)}")
    for name, must in required.items():
        if must and name not in options:
            raise ConfigError(f"{what} needs the option {name}; give {name}=…")


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the nearest known one, then all of them."""
    names = list(names)
    return f"{closest(name, names, ';')} Known: {', '.join(names)}" if names else ""


def divisors(n: int) -> str:
    """List the divisors of ``n`` as an error message does."""
    return ", ".join(map(str, divisors_of(n)))


def check_sizes(what: str, **sizes: int | None) -> None:
    """Raise ConfigError unless each size (None: left to the model) is from 1 to 2^20, or to 2^31 - 1 of what is counted along
    one axis alone (``vocab_size``, ``seq_len``), or to 4096 layers (``num_layers``). ``what`` names the model."""
    for name, size in sizes.items():
        most = {"vocab_size": 2**31 - 1, "seq_len": 2**31 - 1, "num_layers": 4096}.get(name, 2**20)
        if size is not None and size < 1:
            raise ConfigError(f"{what}: {name} is {size}; want 1 or more")
        if size is not None and size > most:
            raise ConfigError(f"{what}: {name} is {size}; want at most {most}")


def check_positions(what: str, seq_len: int, most: int | None) -> None:
    """Raise ConfigError where a model has fewer positions (``max_seq_len``; None: enough) than the sequences it is to read."""
    if most is not None and most < seq_len:
        raise ConfigError(f"{what}: max_seq_len is {most}, and seq_len {seq_len}; want max_seq_len of at least seq_len")


def check_dtype(what: str, dtype: Any) -> np.dtype[Any]:
    """Return the dtype that parameters are created in or computed with, by its name or as JAX has it. ``what`` names the
    option.

    Raises:
        ConfigError: jaxpipe can't train in it: it is no dtype, has no loss scaling here (float16), or JAX would compute in
            another one without a word (float64 unless x64 is enabled).
    """
    try:
        resolved: np.dtype[Any] = jnp.dtype(dtype)
    except (TypeError, ValueError, SyntaxError):  # the last two of odd strings
        raise ConfigError(f"{what} is {dtype!r}, which is no dtype; use float32, bfloat16 or float64") from None
    if resolved.name == "float16":
        raise ConfigError(
            f"{what} is float16, which needs loss scaling, and there is none: gradients below 6e-8 would be 0; use bfloat16"
        )
    if resolved.name not in ("float32", "bfloat16", "float64"):
        raise ConfigError(f"{what} is {resolved.name}; use float32, bfloat16 or float64")
    if resolved.name == "float64" and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
        raise ConfigError(
            f"{what} is float64, which JAX computes in float32 unless x64 is enabled; set JAX_ENABLE_X64=1, or use float32"
        )
    return resolved.newbyteorder("=")


def _typed(value: Any, hint: Any, what: str) -> Any:
    """Return ``value`` if it fits the annotation ``hint``; an int becomes a float where a float is wanted, a table options."""
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    record = next((t for t in allowed if isinstance(t, type) and is_dataclass(t)), None)
    if record is not None and isinstance(value, Mapping):
        return build_options(record, value, what)
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in [type(None) if t is None else t for t in allowed]:
        names = " or ".join("nothing" if t is types.NoneType else t.__name__ for t in allowed)
        raise ConfigError(f"{what} is {value!r} ({type(value).__name__}); want {names}")
    return value
