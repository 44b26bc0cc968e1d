"""Vision transformer: pictures cut into patches, learned positions, GPT-2's blocks without the causal mask.

    B batch   Y × X pixels   C channels   P patch   N = Y·X / P² patches   D d_model   H heads   t tensor-parallel shards

After Dosovitskiy et al., "An Image is Worth 16x16 Words" (2021), without a class token. Patches come in squares of 2 × 2, row
by row, so that four neighbours in the sequence are four in the picture. Differs from the encoder of Qwen2-VL: positions are
learned (there rotary, in two dimensions), the MLP's GELU is the tanh form.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.adapters import from_linen
from jaxpipe.stage.model.layer import Layer
from jaxpipe.tensor_parallel import ONE_SHARD, RankMesh, own_time

from .decoder import normal, partial_leaves
from .gpt import GPTConfig, block_layers

Picture = tuple[int, int, int]
"""Pixels down, pixels across, channels."""


def vit_layers(config: GPTConfig, picture: Picture, patch: int, names: tuple[str, str]) -> list[Layer]:
    """Return the layers ``names[0]``, which reads ``images`` [B, Y, X, C] (or [B, Y, X] with one channel) uint8, and
    ``names[1]``_00 …: to [B, N, D]. ``config``: of the blocks; ``seq_len`` is N."""
    pixels = jax.ShapeDtypeStruct((1, *picture), jnp.uint8)
    patches = from_linen(
        names[0],
        Patches(config, patch),
        example=(pixels,),
        reads=("images",),
        kind="vit.patches",
        shards=lambda tp: partial_leaves(tp, ("pixels", "kernel"), ("pixels", "bias"), ("positions",)),
    )
    return [patches, *block_layers(config, names[1], causal=False)]


def num_patches(what: str, picture: Picture, patch: int) -> int:
    """Return the number of patches in a picture.

    Raises:
        ConfigError: it does not divide into squares of 2 × 2 of them.
    """
    down, across, _ = picture
    if down % (2 * patch) or across % (2 * patch):
        raise ConfigError(
            f"{what}: a picture of {down} × {across} does not divide into squares of 2 × 2 patches; make image_height and "
            f"image_width multiples of 2 · patch = {2 * patch}"
        )
    return down * across // patch**2


class Patches(nn.Module):
    config: GPTConfig
    patch: int
    tp: RankMesh = ONE_SHARD

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """[B, Y, X, C] uint8 → [B, N, D], or [B, N/t, D] with sequence parallelism"""
        c, P = self.config, self.patch
        B, Y, X, C = images.shape if images.ndim == 4 else (*images.shape, 1)
        # in squares of 2 × 2 patches: [B, rows of squares, 2, P, squares, 2, P, C]
        cut = images.reshape(B, Y // (2 * P), 2, P, X // (2 * P), 2, P, C).transpose(0, 1, 4, 2, 5, 3, 6, 7)
        flat = cut.reshape(B, c.seq_len, P * P * C)
        dense = nn.Dense(c.d_model, param_dtype=c.dtype, kernel_init=normal(0.02), name="pixels")
        positions = self.param("positions", normal(0.02), (c.seq_len, c.d_model), c.dtype)
        pixels = own_time(flat, self.tp, axis=1).astype(positions.dtype) / 255
        return dense(pixels) + own_time(positions[None], self.tp, axis=1)
