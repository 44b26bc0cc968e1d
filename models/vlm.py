"""A vision-language model: a vision transformer, a merger, and a Llama that reads its pictures among words.

    B batch   T time   N patches   S = N / 4 features of a picture   E vit_size   D d_model   t tensor-parallel shards

After Qwen2-VL (Wang et al., 2024), the models of `stp.txt` section 5.1: the merger joins squares of 2 × 2 patches and brings
them to the width of the language model by an MLP of 4·E; positions of the text whose token is ``image_token`` get the features
of the picture in turn, later ones than there are features stay words. Blocks are Qwen2's (``models/llama.py`` with
``qkv_bias``) and GPT-2's without the mask (``models/vit.py``). Differs: one still picture a sequence, learned positions in the
vision transformer, and one rotary position a token (theirs has three).

It is a chain of layers whose boundaries have different shapes: [B, N, E], [B, S, D], [B, T, D], [B, T, V].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import Model, Path, Shard, build_options, check_sizes, options_of
from jaxpipe.tensor_parallel import (
    ONE_SHARD,
    RankMesh,
    check_shards,
    column_parallel,
    own_time,
    row_parallel,
    whole_time,
)

from .decoder import dense, embed_shards, head_layer, partial_leaves, text_spec, words_of
from .gpt import GPTConfig
from .llama import LlamaConfig, block_layers
from .loss import loss_layer
from .vit import num_patches, vit_layers


@dataclass(frozen=True, slots=True)
class VLMConfig:
    """Options of :func:`VLM`; those without a prefix are the language model's, as in ``LlamaConfig``. Pictures are
    ``image_height`` × ``image_width`` × ``channels`` bytes. ``freeze_vit``: patches and vision transformer are not trained, the
    merger is. ``attention``: of both. ``dtype``: what parameters are created in."""

    vocab_size: int = 256
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    seq_len: int = 16
    mlp_size: int | None = None
    rope_theta: float = 10000.0
    qkv_bias: bool = True
    norm_eps: float = 1e-6
    tied: bool = False
    image_height: int = 12
    image_width: int = 48
    channels: int = 1
    patch: int = 6
    image_token: int = 0
    vit_size: int = 64
    vit_layers: int = 2
    vit_heads: int = 4
    vit_mlp_ratio: int = 4
    freeze_vit: bool = False
    attention: str = "auto"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_sizes("VLM", channels=self.channels, patch=self.patch)
        # For their errors: the configurations of both towers refuse what they can't have.
        _ = self.language, self.vision

    @property
    def picture(self) -> tuple[int, int, int]:
        return self.image_height, self.image_width, self.channels

    @property
    def language(self) -> LlamaConfig:
        names = (
            "vocab_size d_model num_layers num_heads num_kv_heads seq_len mlp_size rope_theta qkv_bias norm_eps tied"
        )
        return LlamaConfig(**{name: getattr(self, name) for name in (*names.split(), "attention", "dtype")})

    @property
    def vision(self) -> GPTConfig:
        return GPTConfig(
            vocab_size=self.vocab_size,
            d_model=self.vit_size,
            num_layers=self.vit_layers,
            num_heads=self.vit_heads,
            seq_len=num_patches("VLM", self.picture, self.patch),
            mlp_ratio=self.vit_mlp_ratio,
            norm_eps=self.norm_eps,
            attention=self.attention,
            dtype=self.dtype,
        )


def VLM(**options: Any) -> Model:  # noqa: N802 - named as the model is
    """Make a vision-language model of the given :class:`VLMConfig` options: layers ``patches``, ``vit_00`` …, ``merger``,
    ``embed``, ``block_00`` …, ``head``, ``loss``."""
    config = build_options(VLMConfig, options, "models.vlm:VLM")
    language, vision = config.language, config.vision
    features = jax.ShapeDtypeStruct((1, vision.seq_len // 4, config.d_model), config.dtype)
    merger = from_linen(
        "merger",
        Merger(vision, config.d_model),
        example=(vision.hidden,),
        kind="vlm.merger",
        shards=partial(_merger_shards, vision),
    )
    embed = from_linen(
        "embed",
        Embed(language, config.image_token),
        example=(features, language.tokens),
        reads=("tokens",),
        kind="vlm.embed",
        shards=partial(embed_shards, language),
    )
    eyes = vit_layers(vision, config.picture, config.patch, ("patches", "vit"))
    layers = [replace(layer, frozen=config.freeze_vit) for layer in eyes]
    layers += [merger, embed, *block_layers(language), head_layer(language), loss_layer(config.vocab_size)]

    def batch_spec(microbatch_size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        images = jax.ShapeDtypeStruct((microbatch_size, *config.picture), jnp.uint8)
        return {"images": images, **text_spec(language, microbatch_size)}

    fields: dict[str, Any] = {"target": "models.vlm:VLM", "options": options_of(config)}
    return Model("vlm", tuple(layers), batch_spec, config.vocab_size, config.seq_len, **fields)


class Merger(nn.Module):
    config: GPTConfig
    width: int
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, N, E] → [B, S, D]; both a t-th of it with sequence parallelism"""
        c, tp = self.config, self.tp
        B, N, E = x.shape
        square = c.norm("norm")(x).reshape(B, N // 4, 4 * E)
        wide = nn.gelu(column_parallel(4 * E, tp, name="up", **dense(c))(square), approximate=True)  # [B, S, 4·E/t]
        return row_parallel(self.width, tp, name="down", **dense(c))(wide)


class Embed(nn.Module):
    config: LlamaConfig
    image_token: int
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, features: jax.Array, tokens: jax.Array) -> jax.Array:
        """features [B, S, D], tokens [B, T] int32 → [B, T, D]; features and result a t-th of it with sequence parallelism"""
        c, tp = self.config, self.tp
        if tp.splits_time:
            features = whole_time(features, tp)
        words = words_of(c, tp)(tokens)
        stands = tokens == self.image_token
        # The k-th image token of a sequence stands for the k-th feature; further ones stay words.
        slot = jnp.cumsum(stands, axis=1) - 1
        stands &= slot < features.shape[1]
        slot = own_time(jnp.where(stands, slot, 0), tp, axis=1)
        image_rows = jnp.take_along_axis(features, slot[:, :, None], axis=1)
        return jnp.where(own_time(stands, tp, axis=1)[:, :, None], image_rows, words)


def _merger_shards(c: GPTConfig, tp: RankMesh) -> Mapping[Path, Shard]:
    check_shards("VLM", tp, {"4 · vit_size": 4 * c.d_model}, seq_len=c.seq_len // 4)
    split: dict[Path, Shard] = {("up", "kernel"): 1, ("up", "bias"): 0, ("down", "kernel"): 0}
    return split | partial_leaves(tp, ("down", "bias"), ("norm", "scale"), ("norm", "bias"))
