"""Llama: RMSNorm before each branch, rotary positions, SwiGLU MLP, grouped-query attention, no biases.

    B batch   T time   D d_model   H query heads   G key/value heads   R = H / G   K head_dim   F mlp_size   V vocabulary
    t tensor-parallel shards

After Touvron et al., "LLaMA" (2023) and "Llama 2" (2023); with ``qkv_bias=True`` the block is that of Qwen2 (2024), with
``qk_norm`` that of Qwen3 (2025), with ``window`` that of Mistral 7B (2023), with ``rope_every=4`` those of SmolLM3 (2025).
Rotary positions after Su et al., "RoFormer" (2021), pairing dimension i with i + K/2; their frequencies are float64 numbers.
Initialisation is GPT-2's: N(0, 0.02), and 0.02 / √(2L) for the projections that write to the residual stream of L blocks.

q, k and v are one projection [D, G, R + 2, K]: for each key/value head its R query heads, then its key, then its value. Gate
and up are one projection [D, 2, F]. Compute follows the dtype of the parameters it is given. RMSNorm, rotation, softmax and
loss run in float32 (float64 if given float64).

On t shards each has H/t query heads, G/t key/value heads, F/t of the MLP and V/t words. Where t is larger than G, t/G shards
compute the same key and value head and divide its query heads: qkv then lies whole on each shard, which takes its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxpipe.context_parallel import own_positions
from jaxpipe.errors import ConfigError
from jaxpipe.interop.table import MOST_LAYERS, HuggingFace, Keys, Part, Tensor, conflict, refused
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import (
    Layer,
    LayerContext,
    Matrix,
    Model,
    Params,
    Path,
    Shard,
    build_options,
    check_sizes,
    divisors,
)
from jaxpipe.tensor_parallel import (
    ONE_SHARD,
    RankMesh,
    check_shards,
    column_parallel,
    own_query_heads,
    row_parallel,
    shard_key,
    sum_parts,
)

from .attention import attention
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
    partial_leaves,
    with_block_names,
    words_of,
)
from .vocabulary import embedding_words, no_params, no_shards


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """The scaling that lowers rotary frequencies, for more positions than the ``original_seq_len`` of the first training:
    ``linear`` (Chen et al., 2023), ``llama3`` (Llama 3.1, 2024) or ``yarn`` (Peng et al., 2023), as ``transformers``
    computes them.

    ``factor``: of all frequencies; with ``llama3`` of those that turn less than ``low_freq_factor`` times in
    ``original_seq_len``, while those above ``high_freq_factor`` stay; with ``yarn`` the same of ``beta_slow`` and
    ``beta_fast``. ``attention_factor``: of yarn, on cos and sin; None: 0.1 · ln(factor) + 1.
    """

    kind: str = "llama3"
    factor: float = 8.0
    original_seq_len: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        what = "Llama: rope_scaling"
        check_sizes(what, original_seq_len=self.original_seq_len)
        if self.kind not in ("linear", "llama3", "yarn"):
            raise ConfigError(f"{what}: kind is {self.kind!r}; use linear, llama3 or yarn")
        for name in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{what}: {name} is {value}; want a number above 0")
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if getattr(self, low) >= getattr(self, high):
                raise ConfigError(
                    f"{what}: {low} is {getattr(self, low)}; want less than {high}, {getattr(self, high)}"
                )

    def scaled(self, frequency: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the lowered frequencies [K/2], and the factor of cos and sin."""
        low = frequency / self.factor
        turns = self.original_seq_len * frequency / (2 * math.pi)  # in the original length
        match self.kind:
            case "linear":
                return low, 1.0
            case "llama3":
                span = self.high_freq_factor - self.low_freq_factor
                keep = np.clip((turns - self.low_freq_factor) / span, 0, 1)
                return low + (frequency - low) * keep, 1.0
        count = len(frequency)
        spacing = -math.log(frequency[-1]) / (count - 1) if count > 1 else 1.0  # between neighbours
        first = max(math.floor(math.log(turns[0] / self.beta_fast) / spacing), 0)
        last = min(math.ceil(math.log(turns[0] / self.beta_slow) / spacing), 2 * count - 1)
        keep = 1 - np.clip((np.arange(count) - first) / max(last - first, 0.001), 0, 1)
        default = 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0
        return low + (frequency - low) * keep, default if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True, slots=True)
class LlamaConfig(DecoderConfig):
    """Options of :func:`Llama`, beside those of each decoder.

    ``num_kv_heads``: None means as many as ``num_heads`` (multi-head attention). ``head_dim``: None means ``d_model /
    num_heads``. ``mlp_size``: None means 8/3 of ``d_model`` rounded up to a multiple of 32. ``rope_every``: each layer of a
    number that it divides, counted from 1, has no rotary positions; 0: all have. Of positions only differences count, so they
    need no new start with the mask ``document``. ``qk_norm``: RMSNorm of queries and keys, one head at a time, or, with
    ``joint_qk_norm``, of all heads together (OLMoE's). ``window``: how many positions each one sees, itself the last of them;
    None: all up to itself. ``dropout`` (which Llama trains without) applies to attention probabilities and to what each branch
    adds.
    """

    model = "Llama"
    norm_leaves = ("scale",)

    tied: bool = False
    num_kv_heads: int | None = None
    head_dim: int | None = None
    mlp_size: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rope_every: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        self.check("num_kv_heads", "head_dim", "mlp_size", "window")
        even = divisors(self.d_model // 2)
        if self.head_dim is not None and self.head_dim % 2:
            raise ConfigError(f"{self.model}: head_dim is {self.head_dim}; rotary positions need an even number")
        if not 0 <= self.rope_every <= self.num_layers:
            raise ConfigError(f"{self.model}: rope_every is {self.rope_every}; want 0 to num_layers, {self.num_layers}")
        if self.head_dim is None and self.d_model % 2:
            raise ConfigError(f"{self.model}: d_model is {self.d_model}; rotary positions need an even number")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"{self.model}: num_heads is {self.num_heads}, which does not divide d_model {self.d_model}; use one of {even}"
            )
        if self.head_size % 2:
            raise ConfigError(
                f"{self.model}: a head has d_model / num_heads = {self.head_size} dimensions, and rotary positions need an "
                f"even number; use num_heads of {even}"
            )
        if self.num_heads % self.kv_heads:
            raise ConfigError(
                f"{self.model}: num_kv_heads is {self.kv_heads}, which does not divide num_heads {self.num_heads}; "
                f"use one of {divisors(self.num_heads)}"
            )
        if self.joint_qk_norm and not self.qk_norm:
            raise ConfigError(
                f"{self.model}: joint_qk_norm is true, and qk_norm false: there is no norm; set both, or none"
            )
        if not 1 < self.rope_theta < float("inf"):
            raise ConfigError(f"{self.model}: rope_theta is {self.rope_theta}; want a number above 1 such as 10000")

    def norm(self, name: str) -> nn.RMSNorm:
        return nn.RMSNorm(epsilon=self.norm_eps, param_dtype=self.dtype, name=name)

    def check_shards(self, tp: RankMesh, *, words: bool = True) -> None:
        sizes = {"num_heads": self.num_heads, **self.hidden_sizes}
        sizes |= {"vocab_size": self.vocab_rows} if words else {}
        width = self.d_model if self.head_dim is None else 0  # of all heads together
        heads = [h for h in range(1, self.d_model + 1) if width % (2 * h) == 0 and h % self.kv_heads == 0]
        check_shards(self.model, tp, sizes, kv_heads=self.kv_heads, seq_len=self.seq_len, allowed={"num_heads": heads})

    @property
    def hidden_sizes(self) -> dict[str, int]:
        """The widths of MLPs that shards divide, by option."""
        return {"mlp_size": self.mlp_width}

    def is_rotary(self, block: int) -> bool:
        """Return whether the block of this number, from 0, rotates queries and keys."""
        return not self.rope_every or (block + 1) % self.rope_every != 0

    @property
    def head_size(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def mlp_width(self) -> int:
        return -(-8 * self.d_model // 96) * 32 if self.mlp_size is None else self.mlp_size


def Llama(**options: Any) -> Model:  # noqa: N802 - named as the model is
    """Make a Llama of the given :class:`LlamaConfig` options: layers ``embed``, ``block_00`` …, ``head``, ``loss``."""
    config = build_options(LlamaConfig, options, "models.llama:Llama")
    return llama_of(config, block_layers(config))


def llama_of(config: LlamaConfig, blocks: Iterable[Layer]) -> Model:
    """Return the model of these blocks, between Llama's embedding and head."""
    kind = config.kind("embed")
    fields: dict[str, Any] = {"example": (config.tokens,), "reads": ("tokens",), "kind": kind}
    embed = from_linen("embed", Embed(config), shards=partial(embed_shards, config), **fields)
    rest = Layer("embed", no_params, lambda params, x, context: x, kind=kind, shards=no_shards)
    embed = replace(embed, words=embedding_words(EMBEDDING, config.vocab_size, rest))
    return language_model(config, (embed, *blocks, head_layer(config)))


def block_layers(config: LlamaConfig) -> list[Layer]:
    """Return the layers ``block_00`` …"""
    block = cache(partial(dense_block, config))
    return with_block_names(block(config.is_rotary(i)) for i in range(config.num_layers))


def dense_block(config: LlamaConfig, rotary: bool) -> Layer:
    """Return the layer of a block of attention and a dense MLP."""
    layer = block_layer(config, Block(config, rotary=rotary), _block_shards)
    matrices = {**attention_matrices(config), **swiglu_matrices()}
    return replace(layer, apply=partial(with_own_heads, layer.apply, config), matrices=matrices)


def rotate(x: jax.Array, theta: float, scaling: RopeScaling | None = None, tp: RankMesh = ONE_SHARD) -> jax.Array:
    """Apply rotary positions: ``x`` [B, T, N, K] with each pair (i, i + K/2) of position t turned by t · theta^(−2i/K), or
    by t times what ``scaling`` makes of that. Of divided sequences T is a shard's, and t a position in the whole."""
    T, K = x.shape[1], x.shape[3]
    wide = jnp.promote_types(x.dtype, jnp.float32)
    frequency, factor = theta ** (-2.0 * np.arange(K // 2) / K), 1.0
    if scaling is not None:
        frequency, factor = scaling.scaled(frequency)
    position = jnp.arange(T, dtype=wide) if tp.cp == 1 else own_positions(T, tp).astype(wide)
    angle = position[:, None] * jnp.asarray(frequency, wide)[None, :]  # [T, K/2]
    cos, sin = jnp.cos(angle)[None, :, None, :], jnp.sin(angle)[None, :, None, :]
    if factor != 1:
        cos, sin = cos * factor, sin * factor
    first, second = jnp.split(x.astype(wide), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


class Embed(nn.Module):
    config: LlamaConfig
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [B, T] int32 → [B, T, D], or [B, T/t, D] with sequence parallelism"""
        return words_of(self.config, self.tp)(tokens)


class Block(DecoderBlock):
    """A transformer block; ``rotary``: queries and keys are rotated by their positions."""

    rotary: bool = True

    @nn.nowrap
    def attention(self, x: jax.Array, segments: jax.Array | None, train: bool, residual: jax.Array | None) -> jax.Array:
        c, tp = self.config, self.tp
        B, K = x.shape[0], c.head_size
        H, G = c.num_heads // tp.size, max(c.kv_heads // tp.size, 1)  # of this shard
        R = H // G
        # Key/value heads of all shards, a shared one counted by each.
        num_groups = G * tp.size
        qkv = column_parallel((num_groups, R + 2, K), tp, name="qkv", **dense(c, bias=c.qkv_bias))(
            x
        )  # [B, T, G, R + 2, K]
        T = qkv.shape[1]
        q = qkv[:, :, :, :R].reshape(B, T, H, K)  # [B, T, G, R, K] → [B, T, H, K]
        k, v = qkv[:, :, :, R], qkv[:, :, :, R + 1]  # each [B, T, G, K]
        key = shard_key(self.make_rng("dropout"), tp) if train and c.dropout > 0 else None
        if c.qk_norm:
            norm = partial(HeadsNorm, c.norm_eps, c.dtype, tp) if c.joint_qk_norm else lambda name: c.norm(name)
            q, k = norm(name="norm_q")(q), norm(name="norm_k")(k)
        if self.rotary:
            turned = partial(rotate, theta=c.rope_theta, scaling=c.rope_scaling, tp=tp)
            q, k = turned(q), turned(k)
        kernel = "xla" if self.is_initializing() else c.attention
        heads = attention(q, k, v, kernel=kernel, window=c.window, segments=segments, dropout=c.dropout, key=key, tp=tp)
        options = dense(c, bias=c.out_bias, residual=True)
        out = row_parallel(c.d_model, tp, residual=residual, axis=(-2, -1), name="out", **options)
        return out(heads)  # [B, T, H, K] → [B, T, D]

    @nn.nowrap
    def mlp(self, x: jax.Array, residual: jax.Array | None) -> jax.Array:
        return swiglu(self.config, self.tp, self.config.mlp_width, x, residual)


class HeadsNorm(nn.Module):
    """RMSNorm over all heads together, [B, T, H, K], of all shards."""

    eps: float
    dtype: Any
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[2:], self.dtype)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        # Between the parallel products each shard has all times, of its own heads.
        squares = sum_parts(jnp.sum(jnp.square(wide), (-2, -1), keepdims=True), replace(self.tp, sequence=False))
        normed = wide * jax.lax.rsqrt(squares / (math.prod(x.shape[2:]) * self.tp.size) + self.eps)
        return normed.astype(x.dtype) * scale[None, None]


def swiglu(
    c: LlamaConfig, tp: RankMesh, width: int, x: jax.Array, residual: jax.Array | None, prefix: str = ""
) -> jax.Array:
    """Apply an MLP of ``width`` hidden values, its layers called ``gate_up`` and ``down`` after ``prefix``, inside a module."""
    options = dense(c, bias=c.mlp_bias)
    gate_up = column_parallel((2, width), tp, split=1, name=f"{prefix}gate_up", **options)(x)  # [B, T, 2, F/t]
    wide = nn.silu(gate_up[:, :, 0]) * gate_up[:, :, 1]  # [B, T, F/t]
    options = dense(c, bias=c.mlp_bias, residual=True)
    return row_parallel(c.d_model, tp, residual=residual, name=f"{prefix}down", **options)(wide)


def with_own_heads(
    apply: Callable[[Params, Any, LayerContext], Any], c: LlamaConfig, params: Params, x: Any, context: LayerContext
) -> Any:
    """Apply a block to this shard's part of a qkv that is replicated over shards."""
    if context.tp.size > c.kv_heads:
        qkv = {name: own_query_heads(leaf, context.tp) for name, leaf in params["qkv"].items()}
        params = {**params, "qkv": qkv}
    return apply(params, x, context)


def _block_shards(c: LlamaConfig, tp: RankMesh) -> Mapping[Path, Shard]:
    return {**attention_shards(c, tp), **swiglu_shards(c, tp)}


def attention_shards(c: LlamaConfig, tp: RankMesh) -> dict[Path, Shard]:
    """Return how a block's leaves but those of its MLP lie on shards."""
    c.check_shards(tp, words=False)
    shared = tp.size > c.kv_heads
    shards: dict[Path, Shard] = {("qkv", "kernel"): "partial" if shared else 1, ("out", "kernel"): 0}
    if c.qkv_bias:
        shards[("qkv", "bias")] = "partial" if shared else 0
    if c.qk_norm and c.joint_qk_norm and shared:
        raise ConfigError(
            f"{c.model}: joint_qk_norm with tp {tp.size}, where shards share key heads: use tp up to {c.kv_heads}, the number "
            "of key and value heads"
        )
    if c.qk_norm:
        norms: Shard = 0 if c.joint_qk_norm else "partial"
        shards |= {("norm_q", "scale"): norms, ("norm_k", "scale"): norms}
    if c.out_bias:
        shards |= partial_leaves(tp, ("out", "bias"))
    return {**shards, **norm_shards(c, "norm_attn", tp), **norm_shards(c, "norm_mlp", tp)}


def swiglu_shards(c: LlamaConfig, tp: RankMesh, prefix: str = "") -> dict[Path, Shard]:
    """Return how the leaves of :func:`swiglu` lie on shards."""
    shards: dict[Path, Shard] = {(f"{prefix}gate_up", "kernel"): 2, (f"{prefix}down", "kernel"): 0}
    if c.mlp_bias:
        shards |= {(f"{prefix}gate_up", "bias"): 1, **partial_leaves(tp, (f"{prefix}down", "bias"))}
    return shards


def attention_matrices(c: LlamaConfig) -> dict[Path, Matrix]:
    qkv = Matrix((0,), (1, 2, 3), split=(2, (c.num_heads // c.kv_heads, 1, 1)))  # [D, G, R + 2, K]: q, k and v
    return {("qkv", "kernel"): qkv, ("out", "kernel"): Matrix((0, 1), (2,))}  # [H, K, D]


def swiglu_matrices(prefix: str = "") -> dict[Path, Matrix]:
    return {(f"{prefix}gate_up", "kernel"): Matrix((0,), (2,)), (f"{prefix}down", "kernel"): Matrix()}  # [D, 2, F]: two


# --- folders of the Hugging Face hub --------------------------------------------------------------------------------------


def hugging_face() -> HuggingFace:
    """Describe Llama 2 and 3, Mistral, Qwen2, Qwen3, SmolLM2 and 3 in folders of the hub. Linear layers are stored as [out,
    in]."""
    return HuggingFace(_options_of, _tensors, _config_of, tied=_tied)


_ARCHITECTURES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3"}
_SIZES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
    },
    "qwen2": {"vocab_size": 151936, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"vocab_size": 151936, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "smollm3": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
        "num_attention_heads": 16, "num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2e6,
    },
}  # fmt: skip
"""The meaning of an absent key by model_type in transformers 5.24, where that is not :data:`_COMMON`."""
_COMMON: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "use_sliding_window": False,
    "max_window_layers": 28, "no_rope_layer_interval": 4, "rope_theta": 1e4,
}  # fmt: skip
_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "beta_fast", "beta_slow", "attention_factor"),
}
"""The numbers of ``config.json`` that each kind of rope scaling has; they have the same names here."""


def _options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = Keys(config)
    keys.only("model_type", *_ARCHITECTURES)
    kind = keys.text("model_type")
    return decoder_options(config, kind, _DEFAULTS[kind])


def decoder_options(config: Mapping[str, Any], kind: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a decoder of the model_type ``kind``. ``defaults``: the meaning of its absent keys, where that is
    not :data:`_COMMON`."""
    defaults = {**_COMMON, **defaults}
    theta = defaults.pop("rope_theta")
    keys = Keys({**defaults, **config})
    keys.whole("num_hidden_layers", most=MOST_LAYERS)
    keys.only("hidden_act", "silu", "swish")
    keys.only("per_layer_config", None)
    bias = kind not in ("mistral", "qwen2") and keys.flag("attention_bias")
    heads = keys.whole("num_attention_heads")
    shared = keys.whole("num_key_value_heads", None if kind == "mistral" else heads)
    if heads % shared:
        raise refused("num_key_value_heads", shared, f"a divisor of num_attention_heads, {heads}")
    rope = _rope_of(keys, kind, theta)
    return {
        **{ours: keys.whole(theirs) for ours, theirs in _SIZES.items()},
        "num_kv_heads": shared,
        "max_seq_len": keys.whole("max_position_embeddings"),
        "mlp_size": keys.whole("intermediate_size"),
        "qkv_bias": bias or kind == "qwen2",
        "out_bias": bias,
        "mlp_bias": kind in ("llama", "smollm3") and keys.flag("mlp_bias"),
        "qk_norm": kind == "qwen3",
        "norm_eps": keys.number("rms_norm_eps", above=0, below=1),
        "tied": keys.flag("tie_word_embeddings"),
        **_head_dim_of(keys, kind),
        **rope,
        **_window_of(keys, kind, rope.get("rope_every", 0)),
    }


def _head_dim_of(keys: Keys, kind: str) -> dict[str, int]:
    """Return the option ``head_dim``, where the file has it or transformers' default is not ``d_model / num_heads``."""
    width, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    if kind == "llama" and width % heads:
        raise refused("hidden_size", width, f"a multiple of num_attention_heads, {heads}")
    # Null there is an error of transformers.
    fixed = "head_dim" in keys.config and kind not in ("llama", "mistral")
    size = keys.whole("head_dim", None if fixed else width // heads)
    if size % 2:
        raise refused("head_dim", size, "rotary positions, which need an even number")
    return {"head_dim": size} if size * heads != width or keys.config.get("head_dim") is not None else {}


def _rope_of(keys: Keys, kind: str, theta: float) -> dict[str, Any]:
    base, scaled, scaling = keys.rope(theta)
    options: dict[str, Any] = {"rope_theta": base}
    if scaled not in ("default", *_SCALINGS):
        raise refused("rope_type", scaled, ", ".join(("default", *_SCALINGS)))
    if scaled != "default":
        options["rope_scaling"] = _scaling_of(keys, scaled, scaling)
    if kind == "smollm3":
        options["rope_every"] = _rope_every_of(keys)
    return options


def _scaling_of(keys: Keys, kind: str, scaling: Keys) -> dict[str, Any]:
    name = "original_max_position_embeddings"
    length = keys.whole("max_position_embeddings") if name not in keys.config or kind == "linear" else keys.whole(name)
    length = scaling.whole(name, length)
    if kind != "linear" and name in keys.config and keys.whole(name) != length:
        raise conflict({name: keys.whole(name), f"{scaling.where}{name}": length})
    required = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    present = [number for number in _SCALINGS[kind] if number in required or scaling.config.get(number) is not None]
    numbers = {number: scaling.number(number) for number in present}
    scaling.only("truncate", True, None)
    for number in ("mscale", "mscale_all_dim"):
        scaling.only(number, None)
    return {"kind": kind, "original_seq_len": length, **numbers}


def _rope_every_of(keys: Keys) -> int:
    """Return the option ``rope_every`` of SmolLM3."""
    count, rope_flags = keys.whole("num_hidden_layers"), keys.config.get("no_rope_layers")
    if rope_flags is None:
        interval = keys.whole("no_rope_layer_interval")
        return interval if interval <= count else 0
    layers = rope_flags[:count] if isinstance(rope_flags, list) else rope_flags
    interval = next((n for n in range(1, count + 2) if layers == [int(i % n != 0) for i in range(1, count + 1)]), None)
    if interval is None:
        raise refused(
            "no_rope_layers", rope_flags, "a 0 for each layer of a number that some interval divides, and 1 for others"
        )
    return interval if interval <= count else 0


def _window_of(keys: Keys, kind: str, rope_every: int) -> dict[str, Any]:
    """Return the option ``window`` of models whose layers all have it."""
    count, kinds = keys.whole("num_hidden_layers"), keys.config.get("layer_types")
    full, sliding = (["full_attention"] * count, ["sliding_attention"] * count)
    is_valid = isinstance(kinds, list) and len(kinds) == count and {*map(str, kinds)} <= {full[0], sliding[0]}
    if kinds is not None and not is_valid:
        raise refused("layer_types", kinds, f"{full[0]} or {sliding[0]} for each of its {count} layers")
    if kind == "llama":
        return {}
    window = None if keys.config.get("sliding_window") is None else keys.whole("sliding_window")
    if kind != "mistral" and not keys.flag("use_sliding_window"):
        window = None
    match kind:
        case "mistral":
            key, slides = "sliding_window", [True] * count
        case "smollm3":
            key, slides = "use_sliding_window", [bool(rope_every) and i % rope_every == 0 for i in range(1, count + 1)]
        case _:
            key, first = "max_window_layers", keys.whole("max_window_layers", least=0)
            slides = [i >= first for i in range(count)]
    types = [sliding[0] if window is not None and slide else full[0] for slide in slides]
    if kinds is not None:
        # The Mistral of version 4 does not look at layer_types, that of version 5 does.
        if (kind == "mistral" and kinds != types) or (window is None and kinds != full):
            raise refused("layer_types", kinds, f"{types[0]} in each of its {count} layers, by its sliding_window")
        key, types = "layer_types", kinds
    if len({*types}) > 1:
        raise refused(key, keys.config.get(key), "layers that all have a window, or none")
    return {} if types == full else {"window": window}


def _tensors(options: Mapping[str, Any]) -> list[Tensor]:
    c = build_options(LlamaConfig, options, "models.llama:Llama")
    return decoder_tensors(c, lambda i, layer: swiglu_tensors(c, f"model.layers.{i}.mlp", layer))


def decoder_tensors(c: LlamaConfig, mlp_tensors: Callable[[int, str], Iterable[Tensor]]) -> list[Tensor]:
    """Return the table of a decoder. ``mlp_tensors``: of the MLP in a layer, by number and name."""
    R = c.num_heads // c.kv_heads
    words = c.vocab_size, c.vocab_rows
    rows = [Tensor.of_words("model.embed_tokens.weight", "embed", ("tokens", "embedding"), *words)]
    for i, layer in enumerate(block_names(c.num_layers)):

        def add(
            name: str, path: str, pattern: str, parts: tuple[Part, ...] = (), i: int = i, layer: str = layer
        ) -> None:
            rows.append(Tensor(f"model.layers.{i}.{name}", layer, tuple(path.split("/")), pattern, parts))

        for name, first, last in (("q", 0, R), ("k", R, R + 1), ("v", R + 1, R + 2)):
            add(f"self_attn.{name}_proj.weight", "qkv/kernel", "(g r k) d -> d g r k", ((2, first, last),))
            if c.qkv_bias:
                add(f"self_attn.{name}_proj.bias", "qkv/bias", "(g r k) -> g r k", ((1, first, last),))
        add("self_attn.o_proj.weight", "out/kernel", "d (h k) -> h k d")
        if c.out_bias:
            add("self_attn.o_proj.bias", "out/bias", "d -> d")
        if c.qk_norm:
            for name in ("q", "k"):
                add(
                    f"self_attn.{name}_norm.weight",
                    f"norm_{name}/scale",
                    "(h k) -> h k" if c.joint_qk_norm else "k -> k",
                )
        add("input_layernorm.weight", "norm_attn/scale", "d -> d")
        add("post_attention_layernorm.weight", "norm_mlp/scale", "d -> d")
        rows.extend(mlp_tensors(i, layer))
    rows.append(Tensor("model.norm.weight", "head", ("norm", "scale"), "d -> d"))
    if not c.tied:
        rows.append(Tensor.of_words("lm_head.weight", "head", ("kernel",), *words))
    return rows


def swiglu_tensors(c: LlamaConfig, theirs: str, layer: str, prefix: str = "") -> Iterator[Tensor]:
    """Yield the rows of :func:`swiglu`, of tensors whose names begin with ``theirs``."""
    for n, name in enumerate(("gate", "up")):
        kernel, bias = ((f"{prefix}gate_up", leaf) for leaf in ("kernel", "bias"))
        yield Tensor(f"{theirs}.{name}_proj.weight", layer, kernel, "(n f) d -> d n f", ((1, n, n + 1),))
        if c.mlp_bias:
            yield Tensor(f"{theirs}.{name}_proj.bias", layer, bias, "(n f) -> n f", ((0, n, n + 1),))
    yield Tensor(f"{theirs}.down_proj.weight", layer, (f"{prefix}down", "kernel"), "d f -> f d")
    if c.mlp_bias:
        yield Tensor(f"{theirs}.down_proj.bias", layer, (f"{prefix}down", "bias"), "d -> d")


def _tied(options: Mapping[str, Any]) -> dict[str, str]:
    return tied_tensors(build_options(LlamaConfig, options, "models.llama:Llama"))


def tied_tensors(c: LlamaConfig) -> dict[str, str]:
    """Return the tensors that a folder may hold beside those of the table, and the one that each is equal to."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if c.tied else {}


def _config_of(options: Mapping[str, Any]) -> dict[str, Any]:
    c = build_options(LlamaConfig, options, "models.llama:Llama")
    if c.qk_norm and c.joint_qk_norm:
        raise ConfigError("transformers has no Llama with joint_qk_norm; a model without it can be exported")
    same = c.qkv_bias == c.out_bias
    fits = {
        "llama": same and not (c.qk_norm or c.rope_every or c.window),
        "mistral": not (c.qkv_bias or c.out_bias or c.mlp_bias or c.qk_norm or c.rope_every),
        "qwen2": c.qkv_bias and not (c.out_bias or c.mlp_bias or c.qk_norm or c.rope_every),
        "qwen3": c.qk_norm and same and not (c.mlp_bias or c.rope_every),
        "smollm3": same and not (c.qk_norm or c.window),
    }
    kind = next((name for name, fit in fits.items() if fit), None)
    if kind is None:
        unsupported = [
            name for name in ("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "rope_every", "window") if getattr(c, name)
        ]
        raise ConfigError(
            f"transformers has no Llama with {' and '.join(unsupported)}; a model without one of them can be exported"
        )
    return decoder_config(c, kind)


def decoder_config(c: LlamaConfig, kind: str) -> dict[str, Any]:
    """Return ``config.json`` of a decoder of the model_type ``kind``, one of :data:`_ARCHITECTURES`."""
    config: dict[str, Any] = {
        "architectures": [f"{_ARCHITECTURES[kind]}ForCausalLM"],
        "model_type": kind,
        **{theirs: getattr(c, ours) for ours, theirs in _SIZES.items()},
        "intermediate_size": c.mlp_width,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_size,
        "max_position_embeddings": c.positions,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": c.tied,
        "attention_dropout": c.dropout,
    }
    if kind in ("llama", "qwen3", "smollm3"):
        config["attention_bias"] = c.qkv_bias
    if kind in ("llama", "smollm3"):
        config["mlp_bias"] = c.mlp_bias
    if kind in ("mistral", "qwen2", "qwen3"):
        config["sliding_window"] = c.window
    if kind in ("qwen2", "qwen3", "smollm3"):
        config["use_sliding_window"] = c.window is not None
        config["max_window_layers"] = 0 if c.window else c.num_layers
        config["layer_types"] = [f"{'sliding' if c.window else 'full'}_attention"] * c.num_layers
    if kind == "smollm3":
        config["no_rope_layer_interval"] = c.rope_every
        config["no_rope_layers"] = [int(i % c.rope_every != 0) for i in range(1, c.num_layers + 1)]
    if c.rope_scaling is not None:
        s = c.rope_scaling
        numbers = {name: getattr(s, name) for name in _SCALINGS[s.kind] if getattr(s, name) is not None}
        config["rope_scaling"] = {"rope_type": s.kind, **numbers}
        if s.kind != "linear":
            config["rope_scaling"]["original_max_position_embeddings"] = s.original_seq_len
    return config
