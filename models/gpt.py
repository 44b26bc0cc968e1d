"""GPT-2: learned positions, LayerNorm before each branch, GELU MLP, multi-head causal attention, biases.

    B batch   T time   D d_model   H heads   K = D / H   F = mlp_ratio · D   V vocabulary   t tensor-parallel shards

After Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), with their initialisation: N(0, 0.02), and
0.02 / √(2L) for the projections that write to the residual stream of L blocks. Differences: positions are N(0, 0.02) too;
q, k and v are one projection [D, 3, H, K] with heads on an axis of their own.

Compute follows the dtype of the parameters it is given. LayerNorm, softmax and loss run in float32 (float64 if given float64).
On t shards each has H/t heads, F/t of the MLP and V/t words; shapes below are those of one shard, t = 1 unless said.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpipe.context_parallel import own_positions, own_times, whole_times
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.interop.config import Keys, refused
from jaxpipe.interop.table import HuggingFace, Tensor
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import Layer, Matrix, Model, Path, Shard
from jaxpipe.stage.model.options import build_options, check_positions, check_sizes, divisors
from jaxpipe.tensor_parallel import (
    ONE_SHARD,
    Dropout,
    TensorParallel,
    VocabParallelEmbed,
    add_branch,
    check_shards,
    column_parallel,
    own_time,
    row_parallel,
    shard_key,
    vocab_parallel_logits,
)

from .attention import attention, check_attention, places
from .loss import loss_layer
from .vocabulary import embedding_words, head_words


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Options of :func:`GPT`. ``max_seq_len``: how many positions there are; None: ``seq_len``. ``gelu``: ``tanh``, as GPT-2
    approximates it, or ``exact``. ``tied``: the head uses the token embedding. ``vocab_multiple``: the vocabulary's rows are
    made a multiple of it, for tensor parallelism; those past ``vocab_size`` are never predicted or learnt. ``attention``:
    ``auto``, ``xla`` or ``cudnn`` (``models/attention.py``). ``mask``: ``causal``, or ``document``: a token sees only what
    has its number in the batch's ``segments``, and positions start again with each. ``dtype``: what parameters are created
    in."""

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    seq_len: int = 128
    max_seq_len: int | None = None
    mlp_ratio: int = 4
    gelu: str = "tanh"
    dropout: float = 0.0
    tied: bool = True
    vocab_multiple: int = 1
    norm_eps: float = 1e-5
    attention: str = "auto"
    mask: str = "causal"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        names = "vocab_size d_model num_layers num_heads seq_len max_seq_len mlp_ratio vocab_multiple"
        check_sizes("GPT", **{name: getattr(self, name) for name in names.split()})
        check_positions("GPT", self.seq_len, self.max_seq_len)
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"GPT: num_heads is {self.num_heads}, which does not divide d_model {self.d_model}; "
                f"use one of {divisors(self.d_model)}"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"GPT: dropout is {self.dropout}; want 0 or more and less than 1")
        if not 0 < self.norm_eps < 1:
            raise ConfigError(f"GPT: norm_eps is {self.norm_eps}; want a small positive number such as 1e-5")
        if self.gelu not in ("tanh", "exact"):
            raise ConfigError(f"GPT: gelu is {self.gelu!r}; use tanh or exact")
        check_attention("GPT", self.attention, self.dropout, self.mask)
        if self.dtype not in ("float32", "float64", "bfloat16"):
            raise ConfigError(f"GPT: dtype is {self.dtype!r}; use float32, float64 or bfloat16")

    @property
    def segments(self) -> tuple[str, ...]:
        """What each block reads of the batch."""
        return ("segments",) if self.mask == "document" else ()

    @property
    def mlp_width(self) -> int:
        return self.mlp_ratio * self.d_model

    @property
    def positions(self) -> int:
        return self.seq_len if self.max_seq_len is None else self.max_seq_len

    @property
    def vocab_rows(self) -> int:
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def GPT(**options: Any) -> Model:  # noqa: N802 - named as the model is
    """A GPT-2 of the given :class:`GPTConfig` options: layers ``embed``, ``block_00`` …, ``head``, ``loss``."""
    config = build_options(GPTConfig, options, "models.gpt:GPT")
    hidden = jax.ShapeDtypeStruct((1, config.seq_len, config.d_model), config.dtype)
    tied = {("kernel",): ("embed", ("tokens", "embedding"))} if config.tied else {}
    head = from_linen(
        "head", Head(config), example=(hidden,), tied=tied, kind="gpt.head", shards=partial(_head_shards, config)
    )
    rest = from_linen(
        "head", Head(config, False), example=(hidden,), kind="gpt.head", shards=partial(_norm_shards, config)
    )
    head = replace(head, words=head_words(("kernel",), config.vocab_size, rest))
    layers = (embed_layer(config), *block_layers(config), head, loss_layer())

    def batch_spec(microbatch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        shape = (microbatch_size, config.seq_len)
        return {
            "tokens": jax.ShapeDtypeStruct(shape, jnp.int32),
            "targets": jax.ShapeDtypeStruct(shape, jnp.int32),
            "weights": jax.ShapeDtypeStruct(shape, jnp.float32),
            **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name in config.segments},
        }

    names = ("tokens", "targets", "weights", *config.segments)
    return Model("gpt", layers, batch_spec, config.vocab_size, config.seq_len, over_time=names)


def embed_layer(config: GPTConfig, name: str = "embed") -> Layer:
    """The layer that reads ``tokens``."""
    tokens = jax.ShapeDtypeStruct((1, config.seq_len), jnp.int32)
    segments = (tokens,) * len(config.segments)
    made: dict[str, Any] = {"uses_key": config.dropout > 0, "kind": "gpt.embed"}
    layer = from_linen(
        name,
        Embed(config),
        example=(tokens, *segments),
        reads=("tokens", *config.segments),
        shards=partial(_embed_shards, config),
        **made,
    )
    rest = from_linen(
        name,
        Embed(config, False),
        example=(jax.ShapeDtypeStruct((1, config.seq_len, config.d_model), config.dtype), *segments),
        reads=config.segments,
        shards=lambda tp: _partial(tp, ("positions",)),
        **made,
    )
    return replace(layer, words=embedding_words(("tokens", "embedding"), rest))


def block_layers(config: GPTConfig, name: str = "block", *, causal: bool = True) -> list[Layer]:
    """The layers ``name``_00 …: without ``causal``, of an encoder."""
    hidden = jax.ShapeDtypeStruct((1, config.seq_len, config.d_model), config.dtype)
    block = from_linen(
        "block",
        Block(config, causal=causal),
        example=(hidden, *[jax.ShapeDtypeStruct(hidden.shape[:2], jnp.int32) for _ in config.segments]),
        reads=config.segments,
        uses_key=config.dropout > 0,
        kind="gpt.block",
        shards=partial(_block_shards, config),
    )
    return [replace(block, name=each, matrices=MATRICES) for each in block_names(config.num_layers, name)]


def block_names(num_layers: int, name: str = "block") -> list[str]:
    """``block_00``, ``block_01`` …"""
    width = max(2, len(str(num_layers - 1)))
    return [f"{name}_{i:0{width}d}" for i in range(num_layers)]


MATRICES: Mapping[Path, Matrix] = {
    ("qkv", "kernel"): Matrix((0,), (2, 3)),  # [D, 3, H, K]: three matrices
    ("out", "kernel"): Matrix((0, 1), (2,)),  # [H, K, D]
    ("up", "kernel"): Matrix(),
    ("down", "kernel"): Matrix(),
}
"""Of a block."""


class Embed(nn.Module):
    """``whole``: with the words' rows; else it gets what was looked up, [B, T, D], in place of tokens."""

    config: GPTConfig
    whole: bool = True
    tp: TensorParallel = ONE_SHARD

    @nn.compact
    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None, *, train: bool) -> jax.Array:
        """tokens [B, T] int32, T at most c.positions → [B, T, D], or [B, T/t, D] with sequence parallelism"""
        c, T = self.config, tokens.shape[1]
        if c.positions < T * self.tp.cp:
            given = f"got {T * self.tp.cp} tokens; give {c.positions} or fewer"
            raise StageError(f"GPT has {c.positions} positions, {given}")
        if self.whole:
            words = VocabParallelEmbed(
                c.vocab_rows, c.d_model, param_dtype=c.dtype, embedding_init=normal(0.02), tp=self.tp, name="tokens"
            )
        positions = self.param("positions", normal(0.02), (c.positions, c.d_model), c.dtype)
        if segments is not None:
            placed = positions[own_times(places(whole_times(segments, self.tp)), self.tp, 1)]  # [B, T, D]
        else:
            placed = positions[None, :T] if self.tp.cp == 1 else positions[own_positions(T, self.tp)][None]  # [1, T, D]
        x = (words(tokens) if self.whole else tokens) + own_time(placed, self.tp, axis=1)
        return Dropout(c.dropout, tp=self.tp)(x, deterministic=not train)


class Block(nn.Module):
    """``causal``: whether a position sees only those before it and itself; encoders (``models/vit.py``) see all."""

    config: GPTConfig
    tp: TensorParallel = ONE_SHARD
    causal: bool = True

    @nn.compact
    def __call__(self, x: jax.Array, segments: jax.Array | None = None, *, train: bool) -> jax.Array:
        """[B, T, D] → [B, T, D]; both [B, T/t, D] with sequence parallelism"""
        c = self.config
        h = norm(c, "norm_attn")(x)
        x = add_branch(x, partial(self.attention, h, segments, train), Dropout(c.dropout, tp=self.tp), train=train)
        h = norm(c, "norm_mlp")(x)
        return add_branch(x, partial(self.mlp, h), Dropout(c.dropout, tp=self.tp), train=train)

    @nn.nowrap
    def attention(self, x: jax.Array, segments: jax.Array | None, train: bool, residual: jax.Array | None) -> jax.Array:
        c, tp = self.config, self.tp
        K = c.d_model // c.num_heads
        qkv = column_parallel((3, c.num_heads, K), tp, split=1, name="qkv", **_dense(c))(x)  # [B, T, 3, H/t, K]
        q, k, v = (qkv[:, :, i] for i in range(3))  # each [B, T, H/t, K]
        key = shard_key(self.make_rng("dropout"), tp) if train and c.dropout > 0 else None
        kernel = "xla" if self.is_initializing() else c.attention
        heads = attention(
            q, k, v, kernel=kernel, causal=self.causal, segments=segments, dropout=c.dropout, key=key, tp=tp
        )
        return row_parallel(c.d_model, tp, residual=residual, axis=(-2, -1), name="out", **_dense(c, _residual_std(c)))(
            heads
        )  # [B, T, D]

    @nn.nowrap
    def mlp(self, x: jax.Array, residual: jax.Array | None) -> jax.Array:
        c, tp = self.config, self.tp
        wide = column_parallel(c.mlp_width, tp, name="up", **_dense(c))(x)  # [B, T, F/t]
        wide = nn.gelu(wide, approximate=c.gelu == "tanh")
        return row_parallel(c.d_model, tp, residual=residual, name="down", **_dense(c, _residual_std(c)))(wide)


class Head(nn.Module):
    """``whole``: with the words' rows; else it returns what they are multiplied with, [B, T, D]."""

    config: GPTConfig
    whole: bool = True
    tp: TensorParallel = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, D] → logits [B, T, V/t]. The kernel is [V/t, D], as the embedding's, so that it may be tied to it."""
        c = self.config
        if not self.whole:
            return norm(c, "norm")(x)
        kernel = self.param("kernel", normal(0.02), (c.vocab_rows // self.tp.size, c.d_model), c.dtype)
        return vocab_parallel_logits(norm(c, "norm")(x), kernel, self.tp, words=c.vocab_size)


def _embed_shards(c: GPTConfig, tp: TensorParallel) -> Mapping[Path, Shard]:
    _check(c, tp)
    return {("tokens", "embedding"): 0, **_partial(tp, ("positions",))}


def _block_shards(c: GPTConfig, tp: TensorParallel) -> Mapping[Path, Shard]:
    _check(c, tp, words=False)
    split: dict[Path, Shard] = {("qkv", "kernel"): 2, ("qkv", "bias"): 1, ("out", "kernel"): 0}
    split |= {("up", "kernel"): 1, ("up", "bias"): 0, ("down", "kernel"): 0}
    norms = [(norm, leaf) for norm in ("norm_attn", "norm_mlp") for leaf in ("scale", "bias")]
    return split | _partial(tp, ("out", "bias"), ("down", "bias"), *norms)


def _head_shards(c: GPTConfig, tp: TensorParallel) -> Mapping[Path, Shard]:
    _check(c, tp)
    return {("kernel",): 0, **_norm_shards(c, tp)}


def _norm_shards(c: GPTConfig, tp: TensorParallel) -> Mapping[Path, Shard]:
    return _partial(tp, ("norm", "scale"), ("norm", "bias"))


def _partial(tp: TensorParallel, *paths: Path) -> dict[Path, Shard]:
    """What acts on the residual stream: each shard sees all of it, or with sequence parallelism a part."""
    return dict.fromkeys(paths, "partial") if tp.splits_time else {}


def _check(c: GPTConfig, tp: TensorParallel, *, words: bool = True) -> None:
    sizes = {"num_heads": c.num_heads, "mlp_ratio · d_model": c.mlp_width} | (
        {"vocab_size": c.vocab_rows} if words else {}
    )
    heads = [h for h in range(1, c.d_model + 1) if c.d_model % h == 0]
    check_shards("GPT", tp, sizes, seq_len=c.seq_len, allowed={"num_heads": heads})


def normal(std: float) -> Any:
    return nn.initializers.normal(std)


def _residual_std(c: GPTConfig) -> float:
    return float(0.02 / (2 * c.num_layers) ** 0.5)


def norm(c: GPTConfig, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon=c.norm_eps, param_dtype=c.dtype, use_fast_variance=False, name=name)


def _dense(c: GPTConfig, std: float = 0.02) -> dict[str, Any]:
    return {"param_dtype": c.dtype, "kernel_init": normal(std)}


# --- folders of the Hugging Face hub --------------------------------------------------------------------------------------


def hugging_face() -> HuggingFace:
    """GPT-2 in folders of the hub. Its linear layers are stored as [in, out], so nothing is transposed."""
    return HuggingFace(_options_of, _tensors, _config_of, r"\.attn\.(bias|masked_bias)$", "transformer.")


_GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}


def _options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = Keys(config)
    keys.only("model_type", "gpt2")
    keys.only("activation_function", *_GELUS)
    keys.only("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        keys.only(name, False)
    width = keys.whole("n_embd")
    ratio, rest = divmod(keys.whole("n_inner", 4 * width), width)
    if rest:
        raise refused("n_inner", config["n_inner"], f"multiples of n_embd, {width}")
    return {
        "vocab_size": keys.whole("vocab_size"),
        "d_model": width,
        "num_layers": keys.whole("n_layer"),
        "num_heads": keys.whole("n_head"),
        "max_seq_len": keys.whole("n_positions"),
        "mlp_ratio": ratio,
        "gelu": _GELUS[keys.text("activation_function", "gelu_new")],
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "tied": keys.flag("tie_word_embeddings", True),
    }


def _tensors(options: Mapping[str, Any]) -> list[Tensor]:
    c = build_options(GPTConfig, options, "models.gpt:GPT")
    words = c.vocab_size, c.vocab_rows
    rows = [
        Tensor.of_words("transformer.wte.weight", "embed", ("tokens", "embedding"), *words),
        Tensor("transformer.wpe.weight", "embed", ("positions",), "t d -> t d"),
    ]
    for i, layer in enumerate(block_names(c.num_layers)):
        for name, path, pattern in (
            ("ln_1.weight", "norm_attn/scale", "d -> d"),
            ("ln_1.bias", "norm_attn/bias", "d -> d"),
            ("attn.c_attn.weight", "qkv/kernel", "d (n h k) -> d n h k"),
            ("attn.c_attn.bias", "qkv/bias", "(n h k) -> n h k"),
            ("attn.c_proj.weight", "out/kernel", "(h k) d -> h k d"),
            ("attn.c_proj.bias", "out/bias", "d -> d"),
            ("ln_2.weight", "norm_mlp/scale", "d -> d"),
            ("ln_2.bias", "norm_mlp/bias", "d -> d"),
            ("mlp.c_fc.weight", "up/kernel", "d f -> d f"),
            ("mlp.c_fc.bias", "up/bias", "f -> f"),
            ("mlp.c_proj.weight", "down/kernel", "f d -> f d"),
            ("mlp.c_proj.bias", "down/bias", "d -> d"),
        ):
            rows.append(Tensor(f"transformer.h.{i}.{name}", layer, tuple(path.split("/")), pattern))
    rows.append(Tensor("transformer.ln_f.weight", "head", ("norm", "scale"), "d -> d"))
    rows.append(Tensor("transformer.ln_f.bias", "head", ("norm", "bias"), "d -> d"))
    if not c.tied:
        rows.append(Tensor.of_words("lm_head.weight", "head", ("kernel",), *words))
    return rows


def _config_of(options: Mapping[str, Any]) -> dict[str, Any]:
    c = build_options(GPTConfig, options, "models.gpt:GPT")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": c.vocab_size,
        "n_embd": c.d_model,
        "n_layer": c.num_layers,
        "n_head": c.num_heads,
        "n_positions": c.positions,
        "n_inner": c.mlp_width,
        "activation_function": {"tanh": "gelu_new", "exact": "gelu"}[c.gelu],
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), c.dropout),
    }
