"""CLIP: a picture tower and a text tower, whose outputs for the two halves of a pair are to point the same way.

    B pairs   E embed_size   N patches   T time   D d_model of a tower   t tensor-parallel shards

After Radford et al., "Learning Transferable Visual Models From Natural Language Supervision" (2021): two towers' unit vectors,
their products times a learned factor (at most 100, from 14.3), the mean of two cross entropies: of the text among all texts for
each picture, and the other way round. Differs: both towers have GPT-2's blocks without the causal mask and end in the
mean over their positions.

The negatives of a pair are the other pairs that the loss layer is given with it: those of ``group`` consecutive microbatches,
on its dp replica. So that is part of what is computed: other groups are another loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import (
    Layer,
    LayerContext,
    Model,
    Params,
    Path,
    Shard,
    build_options,
    check_sizes,
    options_of,
)
from jaxpipe.tensor_parallel import ONE_SHARD, RankMesh

from .decoder import normal
from .gpt import GPTConfig, block_layers, embed_layer
from .vit import num_patches, vit_layers

_MOST_SCALE = 100.0
_FIRST_LOG_SCALE = 2.6593  # log(1 / 0.07)
_NO_PAIR = -1e30


@dataclass(frozen=True, slots=True)
class CLIPConfig:
    """Options of :func:`CLIP`. ``vocab_size`` and ``seq_len`` are the text's; token 0 is padding. Pictures are
    ``image_height`` × ``image_width`` in one channel. ``group``: microbatches of one loss. ``attention``, ``dtype``: as in
    ``GPTConfig``."""

    vocab_size: int = 256
    seq_len: int = 8
    image_height: int = 12
    image_width: int = 48
    patch: int = 6
    image_size: int = 128
    image_layers: int = 2
    image_heads: int = 4
    text_size: int = 128
    text_layers: int = 2
    text_heads: int = 4
    embed_size: int = 128
    mlp_ratio: int = 4
    norm_eps: float = 1e-5
    group: int = 1
    attention: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_sizes("CLIP", embed_size=self.embed_size, patch=self.patch, group=self.group)
        num_patches("CLIP", (self.image_height, self.image_width, 1), self.patch)
        # For their errors: the configurations of both towers refuse what they can't have.
        self.tower("image"), self.tower("text")

    def tower(self, which: str) -> GPTConfig:
        """Return the decoder config of the blocks of the tower ``image`` or ``text``."""
        length = self.seq_len
        if which == "image":
            length = num_patches("CLIP", (self.image_height, self.image_width, 1), self.patch)
        return GPTConfig(
            vocab_size=self.vocab_size,
            d_model=getattr(self, f"{which}_size"),
            num_layers=getattr(self, f"{which}_layers"),
            num_heads=getattr(self, f"{which}_heads"),
            seq_len=length,
            mlp_ratio=self.mlp_ratio,
            norm_eps=self.norm_eps,
            attention=self.attention,
            dtype=self.dtype,
        )


def CLIP(**options: Any) -> Model:  # noqa: N802 - named as the model is
    """Make a CLIP of the given :class:`CLIPConfig` options: layers ``image_patches``, ``image_00`` …, ``image_head``,
    ``text_embed``, … ``text_head``, ``loss``. Evaluation reports ``retrieval``: the part of the pictures whose own text is the
    nearest of those of the same loss."""
    config = build_options(CLIPConfig, options, "models.clip:CLIP")
    picture = (config.image_height, config.image_width)
    image, text = config.tower("image"), config.tower("text")
    to_unit = partial(_head, config.embed_size)
    layers = [
        *vit_layers(image, (*picture, 1), config.patch, ("image_patches", "image")),
        to_unit("image_head", image),
        replace(embed_layer(text, "text_embed"), takes=()),
        *block_layers(text, "text", causal=False),
        to_unit("text_head", text),
        Layer(
            "loss",
            partial(_init_loss, config.dtype),
            _loss,
            reads=("weights",),
            takes=("image_head", "text_head"),
            kind="clip.loss",
            shards=_whole,
            span=config.group,
        ),
    ]

    def batch_spec(microbatch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {
            "images": jax.ShapeDtypeStruct((microbatch_size, *picture), jnp.uint8),
            "tokens": jax.ShapeDtypeStruct((microbatch_size, config.seq_len), jnp.int32),
            "weights": jax.ShapeDtypeStruct((microbatch_size,), jnp.float32),
        }

    fields: dict[str, Any] = {"target": "models.clip:CLIP", "options": options_of(config), "loss_unit": "nats/pair"}
    return Model("clip", tuple(layers), batch_spec, config.vocab_size, config.seq_len, **fields)


class Head(nn.Module):
    """The end of a tower."""

    config: GPTConfig
    embed_size: int
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, N, D] → unit vectors [B, E], float32 or wider"""
        c = self.config
        mean = jnp.mean(c.norm("norm")(x), axis=1)
        e = nn.Dense(self.embed_size, use_bias=False, param_dtype=c.dtype, kernel_init=normal(0.02), name="embed")(mean)
        wide = e.astype(jnp.promote_types(e.dtype, jnp.float32))
        return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-12)


def _head(embed_size: int, name: str, config: GPTConfig) -> Layer:
    return from_linen(name, Head(config, embed_size), example=(config.hidden,), kind="clip.head", shards=_whole)


def _init_loss(dtype: str, key: jax.Array) -> Params:
    return {"log_scale": jnp.asarray(_FIRST_LOG_SCALE, dtype)}


def _loss(params: Params, x: tuple[jax.Array, jax.Array], context: LayerContext) -> Any:
    """Return loss, weight and the weighted number of pictures that find their text, from unit vectors [B, E] of both
    towers. A pair of weight 0 is nobody's negative."""
    image, text = x
    weights = context.data["weights"].astype(image.dtype)
    scale = jnp.minimum(jnp.exp(params["log_scale"].astype(image.dtype)), _MOST_SCALE)
    scores = scale * jnp.einsum("be,ce->bc", image, text)
    absent = jnp.where(weights != 0, 0, _NO_PAIR).astype(scores.dtype)
    among_texts, among_images = scores + absent[None, :], scores + absent[:, None]
    matching_scores = jnp.diagonal(scores)
    losses = (jax.nn.logsumexp(among_texts, axis=1) + jax.nn.logsumexp(among_images, axis=0)) / 2 - matching_scores
    is_retrieved = (matching_scores >= jnp.max(among_texts, axis=1)).astype(weights.dtype)
    weight = jnp.sum(weights)
    return jnp.sum(weights * losses), weight, {"retrieval": jnp.sum(weights * is_retrieved)}


def _whole(tp: RankMesh) -> Mapping[Path, Shard]:
    if tp.splits_time:
        raise ConfigError("CLIP: the towers' means run over the whole sequence; use sequence_parallel=false")
    return {}
