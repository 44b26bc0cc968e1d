"""Which parameters weight decay acts on: matrices and embeddings, neither biases nor the scales of norms.

A parameter's role decides, never its number of axes alone: biases of several heads have two axes, norm scales of stacked
blocks too. A layer says which of its leaves are matrices (:attr:`~jaxpipe.stage.model.layer.Layer.matrices`); any other leaf
of at least two axes is one unless its name is that of a bias, a scale or an offset. Runs whose checkpoints are older than that
rule go by the number of axes, and keep to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Literal, get_args

import jax

from jaxpipe.stage.model.layer import Layer, Model, Path, every_init_avals
from jaxpipe.stage.model.params import Place, is_trained, named_leaves
from jaxpipe.text import format_count

DecayRule = Literal["role", "axes"]
"""By what parameters are chosen; ``axes``: those of two axes and more."""
DECAY_RULES: tuple[DecayRule, ...] = get_args(DecayRule)

_VECTORS = frozenset({"bias", "biases", "scale", "scales", "offset", "shift", "beta", "gamma", "gain"})
_LETTERS = frozenset({"b", "g"})  # whole names only: the b of lora_b is a matrix
_NORM = re.compile(r"(.*norm|ln)[\d_]*|ln_.*")


def decayed(model: Model, rule: DecayRule = "role") -> frozenset[Place]:
    """The trained parameters of ``model`` that weight decay acts on."""
    return frozenset(
        (layer.name, path)
        for layer, path, leaf in _trained(model)
        if _decays(layer.matrices or (), path, leaf.ndim, rule)
    )


def decay_mask(model: Model, rule: DecayRule = "role") -> Callable[[Any], Any]:
    """A function from a tree ``{layer: leaves}`` to the tree of whether each leaf decays: the ``mask`` of ``optax.adamw``."""
    places = decayed(model, rule)

    def mask(params: Any) -> Any:
        flags = [(names[0], names[1:]) in places for names, _ in named_leaves(params)]
        return jax.tree.unflatten(jax.tree.structure(params), flags)

    return mask


def decay_remark(model: Model, weight_decay: float, rule: DecayRule = "role") -> str:
    """What decays and what does not, in a line."""
    leaves = {(layer.name, path): leaf for layer, path, leaf in _trained(model)}
    places, by_role = decayed(model, rule), decayed(model)
    apart = leaves.keys() - places
    text = f"weight decay {weight_decay:g} acts on {_counted(leaves[at] for at in places)}"
    if apart:
        text += f"; not on {_names(path for _, path in apart)} ({_counted(leaves[at] for at in apart)})"
    if more := places - by_role:
        text += (
            f"; this run began when the number of axes decided what decays, and keeps to that: {_names(p for _, p in more)} "
            f"of {len(more)} leaves decay too"
        )
    return text


def names_vector(path: Path) -> bool:
    """Whether the path of a leaf is that of a bias, or of a norm's scale or weight."""
    last = path[-1].lower()
    if last.rstrip("0123456789_") in _LETTERS or _VECTORS.intersection(re.split(r"[\d_.]+", last)):
        return True
    return last in ("w", "weight") and len(path) > 1 and _NORM.fullmatch(path[-2].lower()) is not None


def _decays(said: Collection[Path], path: Path, axes: int, rule: DecayRule) -> bool:
    if rule == "axes":
        return axes >= 2
    return path in said or (axes >= 2 and not names_vector(path))


def _trained(model: Model) -> Iterator[tuple[Layer, Path, Any]]:
    """The leaves that are trained: their layer, the path there, the shape."""
    made = every_init_avals(model.layers)
    for layer in model.layers:
        for path, leaf in named_leaves(made[layer.name]):
            if is_trained(leaf) and layer.trains(path):
                yield layer, path, leaf


def _counted(leaves: Iterable[Any]) -> str:
    sizes = [math.prod(leaf.shape) for leaf in leaves]
    return f"{len(sizes)} leaves, {format_count(sum(sizes))} parameters"


def _names(paths: Iterable[Path]) -> str:
    """The last names of these paths, each once."""
    return ", ".join(sorted({path[-1] for path in paths}))
