"""The unpipelined reference: a model's layers run one after another, on one device, with no schedule.

Tests compare pipelines with it, evaluation and generation use it, and it needs nothing of the pipeline. Layer i of the model
draws from ``fold_in(key, i)``, in ``init`` as in ``apply``, with i counted over the whole model: a cut into stages changes no
random number. :func:`resolve_model` finds a model by a name such as ``models.gpt:GPT``.

The models that come with jaxpipe are ``jaxpipe.models``; ``models``, as they are called in a checkout, means them wherever
there is no other module of that name.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import operator
import pkgutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path as FilePath
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe import lazy
from jaxpipe._jax_compat import eval_jaxpr, only_results
from jaxpipe.errors import ConfigError, JaxpipeError, StageError
from jaxpipe.stage.model.layer import (
    Layer,
    LayerContext,
    Model,
    Params,
    With,
    check_names,
    given_to,
    split_result,
    suggestion,
    taken_by,
)
from jaxpipe.stage.model.params import with_tied_leaves

_STATIC = (bool, int, float, complex, str, bytes, Enum, np.dtype, type)
"""Types of the values that may go from layer to layer besides arrays."""
_MOST_KNOWN = 20  # names in a message
_OURS = "jaxpipe.models"


def init_params(model: Model, seed: int) -> dict[str, Params]:
    """Fresh parameters ``{layer name: dict pytree}``, tied leaves only at their owner. Float32 unless the model says else."""
    key, model = jax.random.key(seed), model.stored
    return {layer.name: layer.init(jax.random.fold_in(key, i)) for i, layer in enumerate(model.layers)}


def apply_model(
    model: Model,
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    train: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """Forward of the whole model on one microbatch (the rows of ``model.span`` of them, where its loss takes so many at once):
    ``(loss_sum, weight_sum)``, two scalars (of several losses, as :func:`combined`). In training with the losses of layers
    (:attr:`~jaxpipe.stage.model.layer.Layer.losses`).

    ``key`` is the microbatch's, typed or raw threefry data (uint32[2]); None will do when no layer draws random numbers, or
    with ``train=False``. Differentiable in ``params``; the gradient of a tied leaf arrives at its owner, summed over its uses.
    Raises StageError when ``batch`` lacks an array that a layer reads, or a layer needs a key.
    """
    heads, others = _heads(model, params, batch, key, train)
    factors = model.layer_losses
    scaled = [(factors[name] * loss_sum, weight_sum) for name, (loss_sum, weight_sum) in others.items()]
    return combined([*heads.values(), *(scaled if train else ())])


def named_metrics(model: Model, results: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """``loss`` and the metrics of the loss layer, by what the losses return for one microbatch: what is summed and what that is
    divided by. Of several losses each stands there under its layer's name too (but one named ``loss``)."""
    heads = _named_heads(model, results)
    named: dict[str, Any] = {"loss": combined(heads.values())}
    for layer, (loss_sum, weight_sum, *rest) in heads.items():
        if len(heads) > 1 and layer != "loss":
            named[layer] = (loss_sum, weight_sum)
        for name, value in rest[0].items() if rest else ():
            named[name] = value if isinstance(value, tuple) else (value, weight_sum)
    return named


def combined(heads: Iterable[Sequence[Any]]) -> tuple[Any, Any]:
    """Combine the losses of ``heads``, each a pair (loss sum, weight sum), into one pair: its quotient is the sum of theirs,
    and its weight that of the first. A single one stays as it is. A loss without weight counts nothing."""
    (loss_sum, weight_sum, *_), *further_heads = heads
    for other_sum, other_weight, *_ in further_heads:
        # The inner ``where`` keeps the gradient finite: that of a division by zero would be NaN even where it is not chosen.
        share = jnp.where(other_weight > 0, weight_sum / jnp.where(other_weight > 0, other_weight, 1), 0)
        loss_sum = loss_sum + other_sum * jax.lax.stop_gradient(share)
    return loss_sum, weight_sum


def weights_of(
    model: Model, params: Mapping[str, Params], batch: Mapping[str, jax.ShapeDtypeStruct]
) -> Callable[[Mapping[str, Any]], list[Any]]:
    """Return a function from a microbatch to the weight of each loss, those of layers last. ``params``, ``batch``: shapes.

    Raises:
        StageError: one depends on more than the batch; a step could not know it before its first backward pass.
    """
    loss_names: list[Any] = []

    def weights(params: Any, batch: Any) -> list[Any]:
        heads, others = _heads(model, params, batch, None, False)
        loss_names.extend([*heads, *others])
        return [jnp.asarray(head[1]) for head in (*heads.values(), *others.values())]

    # Asked of the jaxpr, as a weight may pass through a layer's ``apply`` that also reads parameters.
    closed = jax.make_jaxpr(weights)(params, batch)
    count = len(jax.tree.leaves(params))
    for k, name in enumerate(loss_names):
        if any(only_results(closed, [k])[1][:count]):
            raise StageError(
                f"the weight of the loss {name!r} depends on parameters; of several losses each must tell its weight by "
                "the batch alone"
            )
    pruned, is_read = only_results(closed, range(len(loss_names)))

    def loss_weights(batch: Mapping[str, Any]) -> list[Any]:
        leaves = jax.tree.leaves(dict(batch))
        return eval_jaxpr(
            pruned.jaxpr, pruned.consts, *(x for x, yes in zip(leaves, is_read[count:], strict=True) if yes)
        )

    return loss_weights


def model_output(model: Model, params: Mapping[str, Params], batch: Mapping[str, jax.Array]) -> Any:
    """Return what the last loss takes for one microbatch (a tuple of several results), in evaluation mode, in the compute
    dtype. The batch need not hold what only losses read."""
    results = _results(model, taken_by(model.layers)[-1], params, batch, None, False)
    return results[0] if len(results) == 1 else tuple(results)


def logits(model: Model, params: Mapping[str, Params], tokens: jax.Array) -> jax.Array:
    """Return ``[batch, time, vocabulary]`` logits for ``tokens`` [batch, time] int32: :func:`model_output` of a model that
    reads them, each row one document.

    The time axis may be shorter than the model's sequence length if its layers allow that (GPT and Llama here do).
    """
    result: jax.Array = model_output(model, params, {"tokens": tokens, "segments": jnp.zeros_like(tokens)})
    return result


def calling(layer: Layer, params: Params, x: Any, context: LayerContext, where: str = "") -> Any:
    """Call a layer and return its result.

    Raises:
        StageError: it fails, or returns what can't go to another layer; one line that names it, and ``where`` it is.
    """
    named = f"layer {layer.name!r}{where}"
    try:
        y = layer.apply(params, x, context)
    except StageError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise StageError(f"{named} can't be traced: {type(error).__name__}: {reason}") from error
    for leaf in jax.tree.leaves(y):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) and not isinstance(leaf, _STATIC):
            raise StageError(
                f"{named} returns a {type(leaf).__name__}, which is neither an array nor a pytree of them; return a tuple or "
                "dict, or register it with jax.tree_util"
            )
    return y


def resolve_model(name: str, options: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> Model:
    """Make the model that ``module:attribute`` makes of ``options``, for example ``resolve_model("models.gpt:GPT", {...})``,
    and of what it takes of ``offered``.

    Raises:
        ConfigError: as :func:`resolved`; or what comes out is no :class:`~jaxpipe.stage.model.layer.Model`.
    """
    model = resolved("model", name, options, offered)
    if not isinstance(model, Model):
        raise ConfigError(f"model {name} returned a {type(model).__name__}; want a jaxpipe.stage.model.layer.Model")
    return model


def resolved(what: str, name: str, options: Mapping[str, Any], offered: Mapping[str, Any] | None = None) -> Any:
    """Call the function or class ``module:attribute`` with ``options``, and with what it takes of ``offered``. ``what``: the
    kind of thing that it makes, such as ``model``.

    Modules are looked for on ``sys.path``, then in the working directory, and those called ``models.…`` last among the models
    that come with jaxpipe. Nothing of the standard library is imported or called, nor what the module has only imported from
    another package.

    Raises:
        ConfigError: with the nearest name that exists, for a wrong module, attribute or option; importing the module or calling
            the attribute fails.
    """
    module_name, colon, attribute = name.partition(":")
    if not (colon and module_name and attribute):
        raise ConfigError(f"{what} name {name!r}; want module:attribute, as in models.gpt:GPT")
    # Names come from configs and checkpoints, which may be a stranger's: ``os:system`` must not be one, nor what a module of
    # the user's has imported.
    package = module_name.partition(".")[0]
    if package in sys.stdlib_module_names:
        raise ConfigError(f"{what} {name}: {package} is part of Python; name a function of yours that makes a {what}")
    module = _import(module_name, f"{what} {name}")
    home = _OURS if f"{module.__name__}.".startswith(f"{_OURS}.") else package
    factory: Any = getattr(module, attribute, None)
    if not _is_function_or_class(factory):
        local_names = [
            n for n, x in vars(module).items() if _is_function_or_class(x) and x.__module__ == module.__name__
        ]
        hint = suggestion(attribute, [n for n in local_names if n[0] != "_"][:_MOST_KNOWN])
        raise ConfigError(f"{what} {name}: {module_name} has no function or class {attribute!r}{hint}")
    origin = str(factory.__module__)
    if not f"{origin}.".startswith(f"{home}."):
        raise ConfigError(f"{what} {name}: {attribute} is of {origin}; name a function or class that {home} defines")
    try:
        parameters = inspect.signature(factory).parameters
    except ValueError:
        raise ConfigError(f"{what} {name}: {attribute} does not say what arguments it takes; name a function") from None
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    accepted = parameters.keys() | (offered or {}).keys() if takes_any and what == "model" else parameters.keys()
    options = {**{key: value for key, value in (offered or {}).items() if key in accepted}, **options}
    if not takes_any:
        check_names(name, options, {n: p.default is p.empty for n, p in parameters.items()})
    try:
        return factory(**options)
    except JaxpipeError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} {name} can't be made: {_told(error)}") from error


def ours(name: str) -> str | None:
    """Find ``name`` (``module:attribute``) among the models that come with jaxpipe, as ``jaxpipe.models.gpt:GPT``; None if its
    module is not there. Imports nothing but their package."""
    module, colon, attribute = name.removeprefix("jaxpipe.").partition(":")
    if not module.startswith("models."):
        return None
    with suppress(ModuleNotFoundError, ValueError):
        if importlib.util.find_spec(f"jaxpipe.{module}") is not None:
            return f"jaxpipe.{module}{colon}{attribute}"
    return None


def source_of(name: str) -> dict[str, str]:
    """Return the file that the function ``module:attribute`` is looked for in, and its SHA-256. ``home``: the package that it
    is of, ``jaxpipe.models`` for the models that come with jaxpipe, however they are called. Imports the module.

    Raises:
        ConfigError: as :func:`resolved`, for the module.
    """
    module_name = name.partition(":")[0]
    file = FilePath(_import(module_name, name).__file__ or "").resolve()
    comes_along = file.is_relative_to(FilePath(importlib.import_module(_OURS).__file__ or "").resolve().parent)
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    return {"home": _OURS if comes_along else module_name.partition(".")[0], "file": str(file), "sha256": digest}


def offered(name: str, source: Mapping[str, Any] | None) -> str | None:
    """Return the name by which ``name`` of a checkpoint may be imported though nobody but the checkpoint names it:
    :func:`ours`; None for a module that ``source`` (:func:`source_of`, as the checkpoint has it) says to be the user's."""
    return None if source is not None and source.get("home") != _OURS else ours(name)


def _heads(
    model: Model, params: Mapping[str, Params], batch: Mapping[str, jax.Array], key: jax.Array | None, train: bool
) -> tuple[dict[str, tuple[Any, ...]], dict[str, tuple[Any, Any]]]:
    """Return what the losses return, by name of the layer; and the sum and weight of each loss that layers have."""
    extra: dict[int, With] = {}
    heads = _named_heads(model, _results(model, model.losses, params, batch, key, train, extra))
    others: dict[str, tuple[Any, Any]] = {}
    for i, result in extra.items():
        for name, pair in checked_losses(model.layers[i], result).items():
            others[name] = tuple(map(operator.add, others.get(name, (0, 0)), pair))
    return heads, {name: others[name] for name in model.layer_losses if name in others}


def checked_losses(layer: Layer, result: With) -> Mapping[str, tuple[Any, Any]]:
    """Return the losses that a layer returned beside ``y``.

    Raises:
        StageError: they are others than :attr:`~jaxpipe.stage.model.layer.Layer.losses` names, or no pairs.
    """
    if result.losses.keys() != layer.losses.keys() or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in result.losses.values()
    ):
        raise StageError(
            f"layer {layer.name!r} returns the losses {', '.join(result.losses) or 'none'}, and Layer.losses names "
            f"{', '.join(layer.losses) or 'none'}; want (sum, weight) for each"
        )
    return result.losses


def _named_heads(model: Model, results: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    heads = {model.layers[i].name: head for i, head in zip(model.losses, results, strict=True)}
    for name, head in heads.items():
        if not (isinstance(head, tuple) and len(head) in (2, 3)):
            raise StageError(
                f"layer {name!r}, which no layer takes, returns a {type(head).__name__}; want (loss_sum, weight_sum)"
            )
    return heads


def read_by(model: Model, positions: Sequence[int]) -> tuple[str, ...]:
    """The batch arrays that the layers at ``positions``, and those behind them, read."""
    return tuple(dict.fromkeys(name for i in sorted(last_readers(model, positions)) for name in model.layers[i].reads))


def last_readers(model: Model, positions: Sequence[int]) -> dict[int, int]:
    """The layers that those at ``positions`` need, with the last that takes each: past the end for those."""
    sources = taken_by(model.layers)
    readers = dict.fromkeys(positions, len(model.layers))
    # Backwards, so that the first who is seen to take a layer's result is the last to read it.
    for i in range(len(model.layers) - 1, -1, -1):
        if i in readers:
            readers = dict.fromkeys(sources[i], i) | readers
    return readers


def _results(
    model: Model,
    positions: Sequence[int],
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    key: jax.Array | None,
    train: bool,
    extra: dict[int, With] | None = None,
) -> list[Any]:
    """Return the results of the layers at ``positions``; run those that they need, and hold no result longer than that."""
    last_reader = last_readers(model, positions)
    results = run_layers(model, last_reader, last_reader, {}, params, batch, key, train, extra)
    return [results[i] for i in positions]


def run_layers(
    model: Model,
    last_reader: Mapping[int, int],
    among: Iterable[int],
    results: Mapping[int, Any],
    params: Mapping[str, Params],
    batch: Mapping[str, jax.Array],
    key: jax.Array | None = None,
    train: bool = False,
    extra: dict[int, With] | None = None,
) -> dict[int, Any]:
    """Run the layers ``among`` those ``last_reader`` (:func:`last_readers`). ``results``: results of layers before them by
    index; with theirs added and without those that no later layer takes, they are returned. ``params``: of these layers, and of
    the owners of what is tied there. ``extra``: gets what they return beside."""
    if key is not None and not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
    sources, results = taken_by(model.layers), dict(results)
    for index in sorted(last_reader.keys() & set(among)):
        layer = model.layers[index]
        absent = [name for name in layer.reads if name not in batch]
        if absent:
            raise StageError(f"layer {layer.name} reads {absent[0]!r}; the batch has {', '.join(batch)}")
        if layer.name not in params:
            raise StageError(f"no parameters for layer {layer.name} of {model.name}; there are {', '.join(params)}")
        draws = train and layer.uses_key
        if draws and key is None:
            raise StageError(f"layer {layer.name} draws random numbers in training; give key=… or train=False")
        context = LayerContext(
            data={name: batch[name] for name in layer.reads},
            key=jax.random.fold_in(key, index) if draws and key is not None else None,
            train=train,
        )
        x = given_to(layer, [results[k] for k in sources[index]])
        result = split_result(layer.apply(with_tied_leaves(layer, params), x, context))
        results[index] = result.y
        if extra is not None:
            extra[index] = result
        # Dropped after the last reader: the activations of a whole model need not fit at once.
        results = {k: y for k, y in results.items() if last_reader[k] > index}
    return results


def _import(module_name: str, name: str) -> ModuleType:
    """Import the module, also from the working directory, where ``models/`` lies when the command runs in a checkout, or from
    ``jaxpipe.models``."""
    try:
        return lazy.import_from_here(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not (module_name == missing or module_name.startswith(missing + ".")):
            raise ConfigError(f"{name}: {module_name} imports {missing}, which is not installed") from error
        if module_name.startswith("models.") and (missing == "models" or ours(module_name)):
            return _import(f"jaxpipe.{module_name}", name)
        package, _, last = module_name.rpartition(".")
        hint = suggestion(last, _siblings(package)) if package and missing == module_name else ""
        raise ConfigError(f"{name}: no module {missing!r} on sys.path or in {FilePath.cwd()}{hint}") from error
    except JaxpipeError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name}: {module_name} can't be imported: {_told(error)}") from error


def _siblings(package: str) -> list[str]:
    paths = getattr(importlib.import_module(package), "__path__", ())
    return sorted(module.name for module in pkgutil.iter_modules(paths))


def _is_function_or_class(value: Any) -> bool:
    function = inspect.unwrap(value) if callable(value) else value
    return inspect.isfunction(function) or inspect.isclass(function)


def _told(error: BaseException) -> str:
    """Describe what was raised, and the line of the user's code that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    library_files = (__file__, lazy.__file__, "<", sysconfig.get_path("stdlib"))
    user_frames = [f for f in frames if not f.filename.startswith(library_files) and "site-packages" not in f.filename]
    place = f" ({FilePath(user_frames[-1].filename).name}, line {user_frames[-1].lineno})" if user_frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}"
