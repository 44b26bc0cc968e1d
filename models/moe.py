"""A decoder of experts: Llama's blocks, whose MLP is a mixture of experts in all layers but those named dense.

    B batch   T time   D d_model   E num_experts   k top_k   F expert_size   N = B · T tokens of a shard   t tensor-parallel
    shards

The router and the exchange are :mod:`jaxpipe.experts`. Options make it the block of Mixtral (Jiang et al., 2024), Qwen3-MoE
(2025; ``qk_norm``, more and smaller experts), OLMoE (2024) and Qwen2-MoE (``renormalise=False``; ``shared_gate``), or with the
router of DeepSeek-V2 and V3 (``score="sigmoid"``, ``groups``, ``scale``, ``router_bias``, ``shared_size``).

An expert layer has ``router`` [D, E], which is computed with in float32, ``gate_up`` [E, D, 2, F] and ``down`` [E, F, D]; and
``router_bias`` [E], which chooses and is not trained by gradients. Experts that all tokens use are one dense MLP of their joint
width, ``shared_gate_up`` and ``shared_down``; ``shared_gate`` [D, 1] is a sigmoid gate of its result.

It has ``router_fractions`` [E] where ``balance="batch"``, which no gradient trains either: both follow from the counts of a
step.

An expert lies whole on one device. With tensor parallelism they need sequence parallelism, so that each shard has tokens of its
own to send.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from jaxpipe.errors import ConfigError
from jaxpipe.experts import (
    PRODUCTS,
    SCORES,
    Choice,
    balanced_bias,
    batch_balance,
    combine,
    dispatch,
    fractions_of,
    over_data_shard,
    product,
    route,
    sequence_balance,
)
from jaxpipe.interop.table import HuggingFace, Keys, Tensor, refused
from jaxpipe.stage.model.layer import (
    Layer,
    LayerContext,
    Matrix,
    Model,
    Params,
    Path,
    Shard,
    With,
    build_options,
    check_sizes,
    divisors,
)
from jaxpipe.tensor_parallel import Dropout, RankMesh, add_branch

from .decoder import block_layer, normal, partial_leaves, with_block_names
from .llama import (
    Block,
    LlamaConfig,
    attention_matrices,
    attention_shards,
    decoder_config,
    decoder_options,
    decoder_tensors,
    dense_block,
    llama_of,
    swiglu,
    swiglu_matrices,
    swiglu_shards,
    swiglu_tensors,
    tied_tensors,
    with_own_heads,
)

BALANCES = ("sequence", "batch", "none")


@dataclass(frozen=True, slots=True)
class MoEConfig(LlamaConfig):
    """Options of :func:`MoE`, beside those of Llama, whose ``mlp_size`` is that of dense layers.

    ``expert_size``: the hidden width of an expert; None: ``mlp_size``. ``shared_size``: that of the experts that all tokens
    use, together; 0: there are none. ``dense_layers``: the numbers of the layers without experts, from 0, such as ``"0,1,2"``.
    ``score``, ``renormalise``, ``scale``, ``groups``, ``top_groups``, ``group_best``: as in :func:`~jaxpipe.experts.route`.
    ``products``: ``padded`` or ``ragged``. ``capacity`` (padded): for how many of a shard's choices an expert has room, in
    means; ``buffer`` (ragged): for how many a pair of shards has; None: for all, as many as could come, which costs E/k times
    the memory and arithmetic of the mean where products are padded. ``on_drop``: ``count`` the choices that had no room, or
    ``stop`` the run at the first.

    ``balance``: the loss that spreads choices over experts, its mean over layers times ``balance_weight`` added to the model's:
    by ``sequence`` (:func:`~jaxpipe.experts.sequence_balance`), by the fractions of the last step's ``batch``
    (:func:`~jaxpipe.experts.batch_balance`), or ``none``. ``bias_rate``: by how much a step moves ``router_bias`` against the
    load of each expert (:func:`~jaxpipe.experts.balanced_bias`); 0: not.
    """

    model = "MoE"

    num_experts: int = 8
    top_k: int = 2
    expert_size: int | None = None
    shared_size: int = 0
    shared_gate: bool = False
    dense_layers: str = ""
    score: str = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    router_bias: bool = False
    products: str = "padded"
    capacity: float | None = None
    buffer: float | None = None
    on_drop: str = "count"
    balance: str = "sequence"
    balance_weight: float = 0.01
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        sizes = {"num_experts": self.num_experts, "top_k": self.top_k, "expert_size": self.expert_size}
        check_sizes("MoE", **sizes, shared_size=self.shared_size or None)
        E = self.num_experts
        if self.top_k > E:
            raise ConfigError(
                f"MoE: top_k is {self.top_k}, and there are {E} experts; use 1 to {E}, or more num_experts"
            )
        words_of = {"score": SCORES, "products": PRODUCTS, "balance": BALANCES, "on_drop": ("count", "stop")}
        for name, words in words_of.items():
            if getattr(self, name) not in words:
                raise ConfigError(f"MoE: {name} is {getattr(self, name)!r}; use {' or '.join(words)}")
        if self.bias_rate and not self.router_bias:
            raise ConfigError(
                f"MoE: bias_rate is {self.bias_rate}, and there is no router_bias to move; set router_bias=true"
            )
        for name in ("balance_weight", "bias_rate"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"MoE: {name} is {getattr(self, name)}; want 0 or a small number such as 0.01")
        for name in ("capacity", "buffer", "scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"MoE: {name} is {value}; want a number above 0 such as 1.25")
        if self.groups < 1 or E % self.groups:
            raise ConfigError(
                f"MoE: groups is {self.groups}, which does not divide num_experts {E}; use one of {divisors(E)}"
            )
        each = E // self.groups
        # A token's k experts are in its groups, which are compared by their best ones.
        least = -(-self.top_k // each)
        for name, low, high in (("top_groups", least, self.groups), ("group_best", 1, each)):
            if self.groups > 1 and not low <= getattr(self, name) <= high:
                what = f"{self.groups} groups of {each} experts and top_k {self.top_k}"
                raise ConfigError(f"MoE: {name} is {getattr(self, name)}; with {what} use {low} to {high}")
        if self.shared_gate and not self.shared_size:
            raise ConfigError("MoE: shared_gate is true, and shared_size 0: there is nothing to gate; give shared_size")
        names = [name.strip() for name in self.dense_layers.split(",")] if self.dense_layers else []
        if wrong := [name for name in names if not name.isdecimal() or int(name) >= self.num_layers]:
            raise ConfigError(
                f'MoE: dense_layers names {wrong[0]!r}; want numbers from 0 to {self.num_layers - 1} such as "0,1"'
            )

    @property
    def dense(self) -> frozenset[int]:
        """The numbers of the layers without experts."""
        return frozenset(map(int, self.dense_layers.split(","))) if self.dense_layers else frozenset()

    @property
    def hidden_sizes(self) -> dict[str, int]:
        sizes = {"mlp_size": self.mlp_width} if self.dense else {}
        return sizes | ({"shared_size": self.shared_size} if self.shared_size else {})

    @property
    def expert_width(self) -> int:
        return self.mlp_width if self.expert_size is None else self.expert_size

    @property
    def room(self) -> float | None:
        """The limit that these products have."""
        return self.capacity if self.products == "padded" else self.buffer


def MoE(**options: Any) -> Model:  # noqa: N802 - named as the model is
    """Make a decoder of the given :class:`MoEConfig` options: layers ``embed``, ``block_00`` …, ``head``, ``loss``."""
    config = build_options(MoEConfig, options, "models.moe:MoE")
    makers = {True: cache(partial(dense_block, config)), False: cache(partial(expert_block, config))}
    blocks = [makers[i in config.dense](config.is_rotary(i)) for i in range(config.num_layers)]
    return llama_of(config, with_block_names(blocks))


def expert_block(config: MoEConfig, rotary: bool) -> Layer:
    """Return the layer of a block of attention and experts."""
    layer = block_layer(config, ExpertBlock(config, rotary=rotary), _expert_shards)
    experts = {("router",): Matrix(), ("gate_up",): Matrix((1,), (3,)), ("down",): Matrix((1,), (2,))}
    shared = swiglu_matrices("shared_") if config.shared_size else {}
    return replace(
        layer,
        apply=partial(_with_routing, config, partial(with_own_heads, layer.apply, config)),
        matrices={**attention_matrices(config), **experts, **shared},
        experts={("gate_up",): config.top_k, ("down",): config.top_k},
        float32=_is_of_router,
        trainable=_is_trained if config.router_bias or config.balance == "batch" else None,
        losses={} if config.balance == "none" else {"balance": config.balance_weight},
        after_step=partial(_after_step, config) if config.bias_rate or config.balance == "batch" else None,
        judge=partial(_judged, config) if config.on_drop == "stop" and config.room is not None else None,
    )


class Routing(NamedTuple):
    """The router's part in a block. ``choice``: of N tokens; ``counts`` and ``dropped`` [E] int32: this shard's choices by
    expert, and those without room."""

    choice: Choice
    counts: jax.Array
    dropped: jax.Array


def _with_routing(
    c: MoEConfig, apply: Callable[..., tuple[Any, Routing]], params: Params, x: Any, context: LayerContext
) -> With:
    """Apply a block, and return beside the residual stream its balance loss, how many choices each expert got, and how many of
    them had no room; where a run is to stop then, also the most that was asked of a bucket, and what it was a part of."""
    y, (choice, counts, dropped) = apply(params, x, context)
    axes = context.tp.time_axes
    losses = {}
    if c.balance == "sequence":
        losses["balance"] = sequence_balance(choice, len(y), axes)
    if c.balance == "batch":
        losses["balance"] = batch_balance(choice, params["router_fractions"], axes)
    sums = {"load": counts} | ({} if c.room is None else {"dropped": dropped})
    peaks = {}
    if c.on_drop == "stop" and c.room is not None:
        buckets = counts if c.products == "padded" else counts.reshape(context.tp.parts("experts"), -1).sum(1)
        peaks = {"fullest": over_data_shard(buckets, axes, jax.lax.pmax), "choices": jnp.int32(choice.experts.size)}
    return With(y, losses, {name: over_data_shard(n, axes) for name, n in sums.items()}, peaks)


def _after_step(c: MoEConfig, leaves: Params, sums: Mapping[str, jax.Array]) -> Params:
    new = {"router_bias": balanced_bias(leaves["router_bias"], sums["load"], c.bias_rate)} if c.bias_rate else {}
    return new | ({"router_fractions": fractions_of(sums["load"])} if c.balance == "batch" else {})


def _judged(c: MoEConfig, sums: Mapping[str, np.ndarray]) -> str:
    load, dropped, fullest = sums["load"], sums["dropped"], sums["fullest"]
    if not dropped.any():
        return ""
    expert, name = int(dropped.argmax()), "capacity" if c.products == "padded" else "buffer"
    sufficient_room = math.ceil(100 * float(fullest.max()) * len(fullest) / int(sums["choices"])) / 100
    return (
        f"{dropped.sum()} of {load.sum()} choices had no room (on_drop=stop): expert {expert} dropped {dropped[expert]} of its "
        f"{load[expert]}, where the mean is {load.mean():.0f}; {name} is {c.room}, and {sufficient_room} would have held all"
    )


def _is_of_router(path: Path) -> bool:
    return path in (("router",), ("router_bias",), ("router_fractions",))


def _is_trained(path: Path) -> bool:
    return path not in (("router_bias",), ("router_fractions",))


class ExpertBlock(Block):
    """A transformer block with experts in place of its MLP."""

    config: MoEConfig

    @nn.compact
    def __call__(self, x: jax.Array, segments: jax.Array | None = None, *, train: bool) -> tuple[jax.Array, Routing]:
        """[B, T, D] → [B, T, D]; both [B, T/t, D] with sequence parallelism"""
        c, tp = self.config, self.tp
        x = self.attended(x, segments, train)
        h = c.norm("norm_mlp")(x)
        y, routing = self.experts(h)

        def branch(residual: jax.Array | None) -> jax.Array:
            if not c.shared_size:
                return y if residual is None else residual + y
            if not c.shared_gate:
                return swiglu(c, tp, c.shared_size, h, residual, "shared_") + y
            gate = self.param("shared_gate", normal(0.02), (c.d_model, 1), c.dtype)
            shared = y + nn.sigmoid(h @ gate) * swiglu(c, tp, c.shared_size, h, None, "shared_")
            return shared if residual is None else residual + shared

        return add_branch(x, branch, Dropout(c.dropout, tp=tp), train=train), routing

    @nn.nowrap
    def experts(self, h: jax.Array) -> tuple[jax.Array, Routing]:
        """Return the weighted sum of each token's experts, [B, T, D]."""
        c, tp = self.config, self.tp
        E, D, F = c.num_experts, c.d_model, c.expert_width
        shards = tp.parts("experts")
        router = self.param("router", normal(0.02), (D, E), jnp.promote_types(c.dtype, jnp.float32))
        bias = self.param("router_bias", nn.initializers.zeros, (E,), router.dtype) if c.router_bias else None
        if c.balance == "batch":
            # Only told to the loss, and changed after a step; before the first one they are even.
            self.param("router_fractions", nn.initializers.constant(1 / E), (E,), router.dtype)
        gate_up = self.param("gate_up", normal(0.02), (E // shards, D, 2, F), c.dtype)
        down = self.param("down", normal(float(0.02 / (2 * c.num_layers) ** 0.5)), (E // shards, F, D), c.dtype)

        tokens = h.reshape(-1, D)  # [N, D]
        groups = {"groups": c.groups, "top_groups": c.top_groups, "group_best": c.group_best}
        score = {"score": c.score, "renormalise": c.renormalise, "scale": c.scale}
        choice = route(tokens, router, c.top_k, bias=bias, **score, **groups)
        rows, places = dispatch(
            tokens, choice.experts, E, axes=tp.divided_axes("experts"), products=c.products, capacity=c.room
        )
        hidden = product(rows, gate_up, places)  # […, 2, F]
        wide = nn.silu(hidden[..., 0, :]) * hidden[..., 1, :]
        y = combine(product(wide, down, places), choice.weights, places)
        return y.reshape(h.shape), Routing(choice, places.counts, places.dropped)


def _expert_shards(c: MoEConfig, tp: RankMesh) -> Mapping[Path, Shard]:
    shards = tp.parts("experts")
    if tp.size > 1 and not tp.sequence:
        raise ConfigError(
            f"MoE: experts over tp {tp.size} need sequence parallelism, so that each shard has tokens of its own; set "
            "sequence_parallel=true, or use tp 1"
        )
    if c.num_experts % shards:
        raise ConfigError(
            f"MoE: num_experts is {c.num_experts}, which does not divide over ep {tp.ep} × tp {tp.tp}; use ep × tp of "
            f"{divisors(c.num_experts)}, or make num_experts a multiple of {shards}"
        )
    of_stream = [("router",)] + [("router_bias",)] * c.router_bias + [("shared_gate",)] * c.shared_gate
    of_stream += [("router_fractions",)] * (c.balance == "batch")
    experts: dict[Path, Shard] = {("gate_up",): ("experts", 0), ("down",): ("experts", 0)}
    shared = swiglu_shards(c, tp, "shared_") if c.shared_size else {}
    return {**attention_shards(c, tp), **experts, **shared, **partial_leaves(tp, *of_stream)}


# --- folders of the Hugging Face hub --------------------------------------------------------------------------------------


def hugging_face() -> HuggingFace:
    """Describe Mixtral, OLMoE, Qwen2-MoE and Qwen3-MoE in folders of the hub."""
    return HuggingFace(_options_of, _tensors, _config_of, tied=lambda options: tied_tensors(_built(options)))


class _Kind(NamedTuple):
    """A model_type. ``dense``: that of its attention. ``names``: of the number of experts and the width of one in config.json.
    ``defaults``: the meaning of absent keys in transformers 5, where that is not Llama's."""

    architecture: str
    dense: str
    names: tuple[str, str]
    defaults: Mapping[str, Any]


_NAMES = ("num_experts", "moe_intermediate_size")
_QWEN: Mapping[str, Any] = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24, "norm_topk_prob": False}
_KINDS: Mapping[str, _Kind] = {
    "mixtral": _Kind(
        "Mixtral", "mistral", ("num_local_experts", "intermediate_size"),
        {
            "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
            "sliding_window": None, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "olmoe": _Kind(
        "Olmoe", "llama", ("num_experts", "intermediate_size"),
        {
            "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
            "num_attention_heads": 16, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64,
            "num_experts_per_tok": 8, "norm_topk_prob": False,
        },
    ),
    "qwen2_moe": _Kind(
        "Qwen2Moe", "qwen2", _NAMES,
        {
            **_QWEN, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
        },
    ),
    "qwen3_moe": _Kind(
        "Qwen3Moe", "qwen3", _NAMES,
        {
            **_QWEN, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128,
            "moe_intermediate_size": 768, "num_experts_per_tok": 8,
        },
    ),
}  # fmt: skip


def _built(options: Mapping[str, Any]) -> MoEConfig:
    return build_options(MoEConfig, options, "models.moe:MoE")


def _options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    Keys(config).only("model_type", *_KINDS)
    kind = Keys(config).text("model_type")
    _, dense, (experts, width), defaults = _KINDS[kind]
    keys = Keys({**defaults, **config})
    # Both Qwens give some layers a window by rules of their own.
    keys.only("use_sliding_window", False, None)
    keys.only("qkv_bias", True)
    for name in ("clip_qkv", "router_jitter_noise"):
        keys.only(name, None, 0, 0.0)
    options = decoder_options(config, dense, defaults)
    options |= {
        "num_experts": keys.whole(experts),
        "top_k": keys.whole("num_experts_per_tok"),
        "expert_size": keys.whole(width),
        "renormalise": kind == "mixtral" or keys.flag("norm_topk_prob"),
    }
    if kind == "olmoe":
        options |= {"qk_norm": True, "joint_qk_norm": True}
    if kind == "qwen2_moe":
        options |= {"shared_size": keys.whole("shared_expert_intermediate_size"), "shared_gate": True}
    dense_layers = _dense_layers_of(keys) if dense.startswith("qwen") else []
    return options | ({"dense_layers": ",".join(map(str, dense_layers))} if dense_layers else {})


def _dense_layers_of(keys: Keys) -> list[int]:
    """Return the numbers of the layers that a Qwen says have no experts."""
    count, step = keys.whole("num_hidden_layers"), keys.whole("decoder_sparse_step", 1)
    named = keys.config.get("mlp_only_layers") or []
    if not isinstance(named, list) or not all(type(i) is int and 0 <= i < count for i in named):
        raise refused("mlp_only_layers", named, f"numbers of its {count} layers in a list")
    return [i for i in range(count) if i in named or (i + 1) % step]


def _tensors(options: Mapping[str, Any]) -> list[Tensor]:
    c = _built(options)
    if c.balance == "batch":
        raise ConfigError(
            "MoE: balance=batch keeps fractions of choices, which no folder of the hub has; use sequence or none"
        )
    is_mixtral = _kind_of(c) == "mixtral"

    def mlp(i: int, layer: str) -> Iterator[Tensor]:
        if i in c.dense:
            yield from swiglu_tensors(c, f"model.layers.{i}.mlp", layer)
            return
        theirs = f"model.layers.{i}.{'block_sparse_moe' if is_mixtral else 'mlp'}"
        gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
        yield Tensor(f"{theirs}.gate.weight", layer, ("router",), "e d -> d e")
        for e in range(c.num_experts):
            expert = (0, e, e + 1)
            for n, name in enumerate((gate, up)):
                parts = (expert, (2, n, n + 1))
                yield Tensor(f"{theirs}.experts.{e}.{name}.weight", layer, ("gate_up",), "(e n f) d -> e d n f", parts)
            yield Tensor(f"{theirs}.experts.{e}.{down}.weight", layer, ("down",), "d (e f) -> e f d", (expert,))
        if c.shared_size:
            yield from swiglu_tensors(c, f"{theirs}.shared_expert", layer, "shared_")
            yield Tensor(f"{theirs}.shared_expert_gate.weight", layer, ("shared_gate",), "n d -> d n")

    return decoder_tensors(c, mlp)


def _kind_of(c: MoEConfig) -> str | None:
    """Return the model_type of transformers that has these options."""
    if (c.score, c.scale, c.groups, c.router_bias, c.mlp_bias) != ("softmax", 1.0, 1, False, False) or c.rope_every:
        return None
    plain = not (c.qkv_bias or c.out_bias or c.shared_size)
    fits = {
        "mixtral": plain and c.renormalise and not (c.qk_norm or c.dense),
        "olmoe": c.joint_qk_norm and c.qkv_bias == c.out_bias and not (c.shared_size or c.dense or c.window),
        "qwen2_moe": c.qkv_bias and c.shared_gate and not (c.out_bias or c.qk_norm or c.window),
        "qwen3_moe": c.qk_norm and not (c.joint_qk_norm or c.shared_size or c.window) and c.qkv_bias == c.out_bias,
    }
    return next((kind for kind, fit in fits.items() if fit), None)


def _config_of(options: Mapping[str, Any]) -> dict[str, Any]:
    c = _built(options)
    kind = _kind_of(c)
    if kind is None:
        raise ConfigError(
            f"transformers has no mixture of experts with these options; those of {', '.join(_KINDS)} can be exported: softmax "
            "scores, no groups, scale or router_bias, shared_gate where there is shared_size"
        )
    architecture, dense, (experts, width), _ = _KINDS[kind]
    config = decoder_config(c, dense)
    # OLMoE knows no other size of heads, and none of the others' rules of windows.
    absent = {"max_window_layers", "layer_types", "mlp_bias", *(["head_dim"] if kind == "olmoe" else [])}
    if kind == "olmoe" and c.head_size * c.num_heads != c.d_model:
        raise ConfigError(
            f"OLMoE has heads of d_model / num_heads, and head_dim is {c.head_size}; it can't be exported"
        )
    config = {key: value for key, value in config.items() if key not in absent}
    config |= {"architectures": [f"{architecture}ForCausalLM"], "model_type": kind, width: c.expert_width}
    config |= {experts: c.num_experts, "num_experts_per_tok": c.top_k}
    if kind != "mixtral":
        config["norm_topk_prob"] = c.renormalise
    if kind == "qwen2_moe":
        config |= {"shared_expert_intermediate_size": c.shared_size, "qkv_bias": True}
    if dense.startswith("qwen"):
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": sorted(c.dense)}
    return config
