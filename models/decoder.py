"""The parts that the decoders in this folder share: options, the layers of a language model, blocks of two branches, the head.

    B batch   T time   D d_model   V vocabulary   L num_layers   t tensor-parallel shards

A model (``gpt.py``, ``llama.py``) says what is its own: the norm, positions, attention and MLP of a block, and how these lie on
shards. Initialisation is GPT-2's: N(0, 0.02), and 0.02 / √(2L) for the projections that write to the residual stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import Layer, Model, Path, Shard, check_dtype, check_positions, check_sizes, options_of
from jaxpipe.tensor_parallel import (
    ONE_SHARD,
    Dropout,
    RankMesh,
    VocabParallelEmbed,
    add_branch,
    vocab_parallel_logits,
)

from .attention import check_attention
from .loss import loss_layer
from .vocabulary import head_words

EMBEDDING: Path = ("tokens", "embedding")
"""Path of the embedding table in the layer that reads tokens."""


@dataclass(frozen=True, slots=True)
class DecoderConfig(ABC):
    """Options of each decoder. ``max_seq_len``: how many positions there are; None: ``seq_len``. ``tied``: the head uses the
    token embedding. ``vocab_multiple``: the vocabulary's rows are made a multiple of it, for tensor parallelism; those past
    ``vocab_size`` are never read, predicted or learnt. ``attention``: ``auto``, ``xla`` or ``cudnn`` (``models/attention.py``).
    ``mask``: ``causal``, or ``document``: a token sees only what has its number in the batch's ``segments``. ``dtype``: what
    parameters are created in."""

    model: ClassVar[str]
    """The model's name in messages; in small letters, labels of layers begin with it."""
    norm_leaves: ClassVar[tuple[str, ...]]

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    seq_len: int = 128
    max_seq_len: int | None = None
    dropout: float = 0.0
    tied: bool = True
    vocab_multiple: int = 1
    norm_eps: float = 1e-5
    attention: str = "auto"
    mask: str = "causal"
    dtype: str = "float32"

    @abstractmethod
    def norm(self, name: str) -> nn.Module:
        """Return the norm layer over the residual stream."""

    @abstractmethod
    def check_shards(self, tp: RankMesh, *, words: bool = True) -> None:
        """Raise ConfigError where the sizes, that of the vocabulary too if ``words``, do not divide."""

    def check(self, *names: str) -> None:
        """Raise ConfigError for an option above, or one of the sizes ``names``, that can't be."""
        sizes = "vocab_size", "d_model", "num_layers", "num_heads", "seq_len", "max_seq_len", "vocab_multiple", *names
        check_sizes(self.model, **{name: getattr(self, name) for name in sizes})
        check_positions(self.model, self.seq_len, self.max_seq_len)
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"{self.model}: dropout is {self.dropout}; want 0 or more and less than 1")
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"{self.model}: norm_eps is {self.norm_eps}; want a small positive number such as 1e-5")
        check_attention(self.model, self.attention, self.dropout, self.mask)
        check_dtype(f"{self.model}: dtype", self.dtype)

    @property
    def segments(self) -> tuple[str, ...]:
        """The arrays of the batch that each block reads."""
        return ("segments",) if self.mask == "document" else ()

    @property
    def positions(self) -> int:
        return self.seq_len if self.max_seq_len is None else self.max_seq_len

    @property
    def vocab_rows(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        """The aval of one sequence's tokens; ``segments`` have the same."""
        return jax.ShapeDtypeStruct((1, self.seq_len), jnp.int32)

    @property
    def hidden(self) -> jax.ShapeDtypeStruct:
        """The aval of one sequence on the residual stream, between layers."""
        return jax.ShapeDtypeStruct((1, self.seq_len, self.d_model), self.dtype)

    def kind(self, layer: str) -> str:
        return f"{self.model.lower()}.{layer}"


def language_model(config: DecoderConfig, layers: Iterable[Layer]) -> Model:
    """Return the model of these layers and the loss."""
    names = ("tokens", "targets", "weights", *config.segments)
    spec = partial(text_spec, config)
    name = config.model.lower()
    fields: dict[str, Any] = {
        "target": f"models.{name}:{config.model}",
        "options": options_of(config),
        "over_time": names,
    }
    return Model(name, (*layers, loss_layer(config.vocab_size)), spec, config.vocab_size, config.seq_len, **fields)


def text_spec(config: DecoderConfig, microbatch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Return the avals of the arrays that a language model reads."""
    shape = (microbatch_size, config.seq_len)
    dtypes = {
        "tokens": jnp.int32,
        "targets": jnp.int32,
        "weights": jnp.float32,
        **dict.fromkeys(config.segments, jnp.int32),
    }
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}


def block_names(num_layers: int, name: str = "block") -> list[str]:
    """Return the names ``block_00``, ``block_01`` …"""
    width = max(2, len(str(num_layers - 1)))
    return [f"{name}_{i:0{width}d}" for i in range(num_layers)]


def with_block_names(layers: Iterable[Layer]) -> list[Layer]:
    """Return the layers called as :func:`block_names` says."""
    blocks = list(layers)
    return [replace(layer, name=name) for layer, name in zip(blocks, block_names(len(blocks)), strict=True)]


def block_layer(config: DecoderConfig, block: DecoderBlock, shards: Any) -> Layer:
    """Return the layer of a block. ``shards``: as in :class:`Layer`, but called with the configuration first."""
    return from_linen(
        "block",
        block,
        example=(config.hidden, *[config.tokens] * len(config.segments)),
        reads=config.segments,
        uses_key=config.dropout > 0,
        kind=config.kind("block"),
        shards=partial(shards, config),
    )


def head_layer(config: DecoderConfig) -> Layer:
    """Return the layer ``head``. Tied, it takes its kernel from the layer ``embed``."""
    fields: dict[str, Any] = {"example": (config.hidden,), "kind": config.kind("head")}
    tied = {("kernel",): ("embed", EMBEDDING)} if config.tied else {}
    head = from_linen("head", Head(config), tied=tied, shards=partial(_head_shards, config), **fields)
    # Without a tie: in vocabulary-parallel form the parts hold the rows, and are tied themselves.
    rest = from_linen("head", Head(config, False), shards=partial(norm_shards, config, "norm"), **fields)
    return replace(head, words=head_words(("kernel",), config.vocab_size, rest))


class DecoderBlock(nn.Module):
    """Two branches, ``attention(x, segments, train, residual)`` and ``mlp(x, residual)``, which a model's own block has: each
    gives what it adds to the residual stream, with ``residual`` added where that is given."""

    config: DecoderConfig
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array, segments: jax.Array | None = None, *, train: bool) -> jax.Array:
        """[B, T, D] → [B, T, D]; both [B, T/t, D] with sequence parallelism"""
        x = self.attended(x, segments, train)
        h = self.config.norm("norm_mlp")(x)
        return add_branch(x, partial(self.mlp, h), Dropout(self.config.dropout, tp=self.tp), train=train)

    @nn.nowrap
    def attended(self, x: jax.Array, segments: jax.Array | None, train: bool) -> jax.Array:
        """Return the residual stream after the branch of attention."""
        # The branch is passed as a function: on shards ``add_branch`` decides whether the residual is added before the
        # all-reduce.
        h = self.config.norm("norm_attn")(x)
        dropout = Dropout(self.config.dropout, tp=self.tp)
        return add_branch(x, partial(self.attention, h, segments, train), dropout, train=train)


class Head(nn.Module):
    """The last norm and, if ``has_product``, the product with the vocabulary's rows; else it returns that product's input, [B,
    T, D]."""

    config: DecoderConfig
    has_product: bool = True
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → logits [B, T, V/t]. The kernel is [V/t, D], as the embedding's, so that it may be tied to it."""
        c = self.config
        if not self.has_product:
            return c.norm("norm")(x)
        kernel = self.param("kernel", normal(0.02), (c.vocab_rows // self.tp.size, c.d_model), c.dtype)
        return vocab_parallel_logits(c.norm("norm")(x), kernel, self.tp, words=c.vocab_size)


def words_of(c: DecoderConfig, tp: RankMesh) -> VocabParallelEmbed:
    """Return the embedding of the vocabulary, to be called with tokens [B, T] int32 → [B, T, D], or [B, T/t, D] with
    sequence parallelism."""
    options: dict[str, Any] = {"param_dtype": c.dtype, "embedding_init": normal(0.02), "tp": tp, "name": "tokens"}
    return VocabParallelEmbed(c.vocab_rows, c.d_model, words=c.vocab_size, **options)


def normal(std: float) -> Any:
    return nn.initializers.normal(std)


def dense(c: DecoderConfig, *, bias: bool = True, residual: bool = False) -> dict[str, Any]:
    """Return the options of a linear layer; ``residual``: the layer writes to the residual stream."""
    # GPT-2's scaling: 2L branches add to the stream, and its variance is to stay that of one.
    std = float(0.02 / (2 * c.num_layers) ** 0.5) if residual else 0.02
    return {"use_bias": bias, "param_dtype": c.dtype, "kernel_init": normal(std)}


def embed_shards(c: DecoderConfig, tp: RankMesh, *paths: Path) -> Mapping[Path, Shard]:
    """Return how the embedding's leaves lie on shards. ``paths``: the layer's leaves that act on the residual stream."""
    c.check_shards(tp)
    return {EMBEDDING: 0, **partial_leaves(tp, *paths)}


def _head_shards(c: DecoderConfig, tp: RankMesh) -> Mapping[Path, Shard]:
    c.check_shards(tp)
    return {("kernel",): 0, **norm_shards(c, "norm", tp)}


def norm_shards(c: DecoderConfig, name: str, tp: RankMesh) -> Mapping[Path, Shard]:
    return partial_leaves(tp, *((name, leaf) for leaf in c.norm_leaves))


def partial_leaves(tp: RankMesh, *paths: Path) -> dict[Path, Shard]:
    """Return how leaves that act on the residual stream lie on shards: each shard sees all of it, or with sequence
    parallelism a part."""
    # With a part of the time axis each shard makes a part of the gradient; else all make the same, and nothing is to be summed.
    return dict.fromkeys(paths, "partial") if tp.splits_time else {}
