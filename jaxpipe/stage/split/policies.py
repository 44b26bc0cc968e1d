"""Recompute policies by name, without JAX: what a config may say, and what each of them means.

A policy is one name of :data:`POLICIES` or several joined by ``+``: what any of them recomputes is recomputed.
:mod:`jaxpipe.stage.split.recompute` holds the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from jaxpipe.errors import StageError

POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "none": "nothing but elementwise work, where that saves bytes",
        "cheap": "elementwise work, reductions and random masks: norms, activations, gates, dropout, softmax",
        "dots": "all but matrix products, convolutions and inputs of layers",
        "attention": "attention scores and all of their size made from them",
        "mlp": "hidden values of multi-layer perceptrons, from the products that widen to what the last product reads",
        "full": "whole layers: all but their inputs",
        "experts": "as full, but what experts received and returned stays",
        "fused": "what kernels fused by hand recompute: all but operands and results of products, masks, probabilities",
        "flash": "fused+attention: what kernels fused by hand and flash attention recompute",
        "gather": "sequence-parallel inputs of products, gathered over time again",
    }
)
"""Name → what runs again in the backward pass."""

FINDS: Mapping[str, str] = MappingProxyType(
    {
        "attention": "no attention scores",
        "mlp": "no hidden values",
        "gather": "nothing that sequence parallelism gathers",
    }
)
"""Name → what is said of it where there is nothing for it to do."""

STANDARD: tuple[str, ...] = (
    "none", "fused", "cheap", "attention", "mlp", "flash", "cheap+attention", "cheap+mlp", "cheap+attention+mlp", "full"
)  # fmt: skip
"""The policies worth comparing: each ingredient alone, then combinations in order of what they save."""


def ingredients(name: str) -> tuple[str, ...]:
    """The names that a policy joins, each once, in the order of :data:`POLICIES`.

    Raises:
        StageError: one of them does not exist.
    """
    parts = [part.strip() for part in name.split("+")]
    for part in parts:
        if part not in POLICIES:
            raise StageError(
                f"recompute policy {part!r} does not exist; choose one of {', '.join(POLICIES)}, or several joined by +, "
                "such as cheap+attention"
            )
    return tuple(part for part in POLICIES if part in parts)


def per_stage(recompute: str | Sequence[str], num_stages: int) -> tuple[str, ...]:
    """One policy a stage from one name for all, or from a list of as many names as stages.

    Raises:
        StageError: the list has another length, or a name does not exist.
    """
    names = (recompute,) * num_stages if isinstance(recompute, str) else tuple(recompute)
    if len(names) != num_stages:
        raise StageError(
            f"{len(names)} recompute policies for {num_stages} stages; give one name for all stages, or a list of {num_stages}"
        )
    for name in set(names):
        ingredients(name)
    return names
