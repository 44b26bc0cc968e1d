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
from typing import Any

import jax
from flax import linen as nn

from jaxpipe.context_parallel import own_positions, own_times, whole_times
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.interop.table import MOST_LAYERS, HuggingFace, Keys, Tensor, conflict, refused
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import Layer, Matrix, Model, Path, Shard, build_options, divisors
from jaxpipe.tensor_parallel import (
    ONE_SHARD,
    Dropout,
    RankMesh,
    check_shards,
    column_parallel,
    own_time,
    row_parallel,
    shard_key,
)

from .attention import attention, places
from .decoder import (
    EMBEDDING,
    DecoderBlock,
    DecoderConfig,
    block_layer,
    block_names,
    dense,
    embed_shards,
    head_layer,
    language_model,
    norm_shards,
    normal,
    partial_leaves,
    words_of,
)
from .vocabulary import embedding_words


@dataclass(frozen=True, slots=True)
class GPTConfig(DecoderConfig):
    """Options of :func:`GPT`, beside those of each decoder. ``gelu``: ``tanh``, as GPT-2 approximates it, or ``exact``. With
    the mask ``document``, positions start again with each document."""

    model = "GPT"
    norm_leaves = ("scale", "bias")

    mlp_ratio: int = 4
    gelu: str = "tanh"

    def __post_init__(self) -> None:
        self.check("mlp_ratio")
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"GPT: num_heads is {self.num_heads}, which does not divide d_model {self.d_model}; "
                f"use one of {divisors(self.d_model)}"
            )
        if self.gelu not in ("tanh", "exact"):
            raise ConfigError(f"GPT: gelu is {self.gelu!r}; use tanh or exact")

    def norm(self, name: str) -> nn.LayerNorm:
        return nn.LayerNorm(epsilon=self.norm_eps, param_dtype=self.dtype, use_fast_variance=False, name=name)

    def check_shards(self, tp: RankMesh, *, words: bool = True) -> None:
        sizes = {"num_heads": self.num_heads, "mlp_ratio · d_model": self.mlp_width}
        sizes |= {"vocab_size": self.vocab_rows} if words else {}
        heads = [h for h in range(1, self.d_model + 1) if self.d_model % h == 0]
        check_shards("GPT", tp, sizes, seq_len=self.seq_len, allowed={"num_heads": heads})

    @property
    def mlp_width(self) -> int:
        return self.mlp_ratio * self.d_model


def GPT(**options: Any) -> Model:  # noqa: N802 - named as the model is
    """Make a GPT-2 of the given :class:`GPTConfig` options: layers ``embed``, ``block_00`` …, ``head``, ``loss``."""
    config = build_options(GPTConfig, options, "models.gpt:GPT")
    return language_model(config, (embed_layer(config), *block_layers(config), head_layer(config)))


def embed_layer(config: GPTConfig, name: str = "embed") -> Layer:
    """Return the layer that reads ``tokens``."""
    segments = [config.tokens] * len(config.segments)
    fields: dict[str, Any] = {"uses_key": config.dropout > 0, "kind": "gpt.embed"}
    layer = from_linen(
        name,
        Embed(config),
        example=(config.tokens, *segments),
        reads=("tokens", *config.segments),
        shards=lambda tp: embed_shards(config, tp, ("positions",)),
        **fields,
    )
    rest = from_linen(
        name,
        Embed(config, False),
        example=(config.hidden, *segments),
        reads=config.segments,
        shards=lambda tp: partial_leaves(tp, ("positions",)),
        **fields,
    )
    return replace(layer, words=embedding_words(EMBEDDING, config.vocab_size, rest))


def block_layers(config: GPTConfig, name: str = "block", *, causal: bool = True) -> list[Layer]:
    """Return the layers ``name``_00 …; without ``causal`` they are an encoder's."""
    block = block_layer(config, Block(config, causal=causal), _block_shards)
    return [replace(block, name=each, matrices=MATRICES) for each in block_names(config.num_layers, name)]


MATRICES: Mapping[Path, Matrix] = {
    ("qkv", "kernel"): Matrix((0,), (2, 3)),  # [D, 3, H, K]: three matrices
    ("out", "kernel"): Matrix((0, 1), (2,)),  # [H, K, D]
    ("up", "kernel"): Matrix(),
    ("down", "kernel"): Matrix(),
}
"""Matrices of a block, for optimizers and decay that go by matrix."""


class Embed(nn.Module):
    """Token and position embeddings; unless it ``looks_up`` ids, the input is embedded tokens, [B, T, D], in place of ids."""

    config: GPTConfig
    looks_up: bool = True
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, tokens: jax.Array, segments: jax.Array | None = None, *, train: bool) -> jax.Array:
        """tokens [B, T] int32, T at most c.positions → [B, T, D], or [B, T/t, D] with sequence parallelism"""
        c, T = self.config, tokens.shape[1]
        # T is a shard's where sequences are divided.
        if c.positions < T * self.tp.cp:
            advice = f"got {T * self.tp.cp} tokens; give {c.positions} or fewer"
            raise StageError(f"GPT has {c.positions} positions, {advice}")
        if self.looks_up:
            words = words_of(c, self.tp)
        positions = self.param("positions", normal(0.02), (c.positions, c.d_model), c.dtype)
        # Documents start from position 0 each, wherever they stand in the sequence.
        if segments is not None:
            placed = positions[own_times(places(whole_times(segments, self.tp)), self.tp, 1)]  # [B, T, D]
        else:
            placed = positions[None, :T] if self.tp.cp == 1 else positions[own_positions(T, self.tp)][None]  # [1, T, D]
        x = (words(tokens) if self.looks_up else tokens) + own_time(placed, self.tp, axis=1)
        return Dropout(c.dropout, tp=self.tp)(x, deterministic=not train)


class Block(DecoderBlock):
    """A transformer block; ``causal``: a position attends only to itself and those before it; encoders (``models/vit.py``)
    see all."""

    causal: bool = True

    @nn.nowrap
    def attention(self, x: jax.Array, segments: jax.Array | None, train: bool, residual: jax.Array | None) -> jax.Array:
        c, tp = self.config, self.tp
        K = c.d_model // c.num_heads
        qkv = column_parallel((3, c.num_heads, K), tp, split=1, name="qkv", **dense(c))(x)  # [B, T, 3, H/t, K]
        q, k, v = (qkv[:, :, i] for i in range(3))  # each [B, T, H/t, K]
        key = shard_key(self.make_rng("dropout"), tp) if train and c.dropout > 0 else None
        # Shapes of parameters do not depend on the kernel, and ``init`` may run where there is no GPU.
        kernel = "xla" if self.is_initializing() else c.attention
        heads = attention(
            q, k, v, kernel=kernel, causal=self.causal, segments=segments, dropout=c.dropout, key=key, tp=tp
        )
        out = row_parallel(c.d_model, tp, residual=residual, axis=(-2, -1), name="out", **dense(c, residual=True))
        return out(heads)  # [B, T, H/t, K] → [B, T, D]

    @nn.nowrap
    def mlp(self, x: jax.Array, residual: jax.Array | None) -> jax.Array:
        c, tp = self.config, self.tp
        wide = column_parallel(c.mlp_width, tp, name="up", **dense(c))(x)  # [B, T, F/t]
        wide = nn.gelu(wide, approximate=c.gelu == "tanh")
        return row_parallel(c.d_model, tp, residual=residual, name="down", **dense(c, residual=True))(wide)


def _block_shards(c: GPTConfig, tp: RankMesh) -> Mapping[Path, Shard]:
    c.check_shards(tp, words=False)
    split: dict[Path, Shard] = {("qkv", "kernel"): 2, ("qkv", "bias"): 1, ("out", "kernel"): 0}
    split |= {("up", "kernel"): 1, ("up", "bias"): 0, ("down", "kernel"): 0}
    # Biases behind a row-parallel product are added once, to the sum: they act on the residual stream.
    split |= partial_leaves(tp, ("out", "bias"), ("down", "bias"))
    return {**split, **norm_shards(c, "norm_attn", tp), **norm_shards(c, "norm_mlp", tp)}


# --- folders of the Hugging Face hub --------------------------------------------------------------------------------------


def hugging_face() -> HuggingFace:
    """Describe GPT-2 in folders of the hub. Its linear layers are stored as [in, out], so nothing is transposed."""
    return HuggingFace(_options_of, _tensors, _config_of, r"\.attn\.(bias|masked_bias)$", "transformer.", _tied)


_SIZES = {"vocab_size": "vocab_size", "d_model": "n_embd", "num_layers": "n_layer", "num_heads": "n_head"}
_GELUS = {"gelu_new": "tanh", "gelu_pytorch_tanh": "tanh", "gelu": "exact"}


_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
}  # fmt: skip
"""Values that transformers takes where a key is absent."""
_ALIASES = {
    "hidden_size": "n_embd", "max_position_embeddings": "n_positions", "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}  # fmt: skip
"""Other names that transformers takes for these keys."""


def _options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    for other, name in _ALIASES.items():
        if other in config and config.get(name, config[other]) != config[other]:
            raise conflict({key: config[key] for key in (name, other)})
    aliased = {name: config[other] for other, name in _ALIASES.items() if other in config}
    keys = Keys({**_DEFAULTS, **aliased, **config})
    keys.only("model_type", "gpt2")
    keys.whole("n_layer", most=MOST_LAYERS)
    keys.only("activation_function", *_GELUS)
    keys.only("scale_attn_weights", True)
    keys.only("per_layer_config", None)
    for name in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"):
        keys.only(name, False)
    width, heads = keys.whole("n_embd"), keys.whole("n_head")
    ratio, rest = divmod(keys.whole("n_inner", 4 * width), width)
    if rest:
        raise refused("n_inner", config["n_inner"], f"multiples of n_embd, {width}")
    if width % heads:
        raise refused("n_embd", width, f"a multiple of n_head, {heads}")
    return {
        **{ours: keys.whole(theirs) for ours, theirs in _SIZES.items()},
        "max_seq_len": keys.whole("n_positions"),
        "mlp_ratio": ratio,
        "gelu": _GELUS[keys.text("activation_function")],
        "norm_eps": keys.number("layer_norm_epsilon", above=0, below=1),
        "tied": keys.flag("tie_word_embeddings"),
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


def _tied(options: Mapping[str, Any]) -> dict[str, str]:
    c = build_options(GPTConfig, options, "models.gpt:GPT")
    return {"lm_head.weight": "transformer.wte.weight"} if c.tied else {}


def _config_of(options: Mapping[str, Any]) -> dict[str, Any]:
    c = build_options(GPTConfig, options, "models.gpt:GPT")
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        **{theirs: getattr(c, ours) for ours, theirs in _SIZES.items()},
        "n_positions": c.positions,
        "n_inner": c.mlp_width,
        "activation_function": {"tanh": "gelu_new", "exact": "gelu"}[c.gelu],
        "layer_norm_epsilon": c.norm_eps,
        "tie_word_embeddings": c.tied,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), c.dropout),
    }
