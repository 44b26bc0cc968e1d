"""Models that nobody wrote for jaxpipe, as small as they can be: the kinds that Flax's public examples show, in linen and nnx.

Some are lists of layers written by hand (``from_linen``, ``from_nnx``), some are cut by ``layers_from_linen`` and
``layers_from_nnx``, unchanged. Legend: B batch, T time, D width, H heads, K size of a head, V vocabulary, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxpipe.stage.model.adapters import from_linen, from_nnx, layers_from_linen
from jaxpipe.stage.model.cut_nnx import layers_from_nnx
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params

V, T, D, H, B = 13, 6, 8, 2, 2
X = jax.ShapeDtypeStruct((B, T, D), jnp.float32)
TOKENS = jax.ShapeDtypeStruct((B, T), jnp.int32)


def cross_entropy(logits: jax.Array, batch: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1)
    return -jnp.sum(picked), jnp.float32(picked.size)


def loss_layer(loss: Callable[[Any, Any], Any] = cross_entropy, *reads: str) -> Layer:
    def apply(params: Params, x: Any, context: LayerContext) -> Any:
        return loss(x, context.data)

    return Layer("loss", lambda key: {}, apply, reads=reads or ("targets",))


def by_hand(name: str, *layers: Layer, **arrays: jax.ShapeDtypeStruct) -> Model:
    def batch_spec(size: int) -> Mapping[str, jax.ShapeDtypeStruct]:
        return {n: jax.ShapeDtypeStruct((size, *a.shape[1:]), a.dtype) for n, a in arrays.items()}

    return Model(name, layers, batch_spec, 0, 0)


# --- 1. nnx GPT with RMSNorm, dropout and a table of rotations that every block holds -----------------------------------


class Rotary(nnx.Module):
    def __init__(self, size: int) -> None:
        angle = jnp.arange(T)[:, None] * 10.0 ** -jnp.arange(size // 2)[None]
        self.cos, self.sin = jnp.cos(angle), jnp.sin(angle)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, H, K]
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = self.cos[None, :, None, :], self.sin[None, :, None, :]
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


class GPTBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.2) -> None:
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.qkv = nnx.LinearGeneral(D, (3, H, D // H), use_bias=False, rngs=rngs)
        self.out = nnx.LinearGeneral((H, D // H), D, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.rotary = Rotary(D // H)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        q, k, v = jnp.moveaxis(self.qkv(self.norm(x)), -3, 0)
        attended = jax.nn.dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return x + self.dropout(self.out(attended))


class NnxGPT(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, blocks: int = 2) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.blocks = nnx.List([GPTBlock(rngs) for _ in range(blocks)])
        self.norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.dropout(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(self.norm(x))  # type: ignore[no-any-return]


def nnx_gpt() -> Model:
    batch = {"tokens": TOKENS, "targets": TOKENS}
    return layers_from_nnx(NnxGPT(nnx.Rngs(0)), "blocks", batch=batch, reads=("tokens",), loss=cross_entropy)


# --- 2. linen ViT: convolution, encoder, pooling, classes ---------------------------------------------------------------


class Patches(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(D, (2, 2), strides=(2, 2))(images)
        x = x.reshape(len(x), -1, D)
        return x + self.param("position", nn.initializers.normal(), (1, x.shape[1], D))


class EncoderBlock(nn.Module):
    rate: float = 0.2

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        h = nn.MultiHeadDotProductAttention(H, use_bias=False)(nn.LayerNorm()(x))
        x = x + nn.Dropout(self.rate)(h, deterministic=deterministic)
        return x + nn.Dense(D)(nn.gelu(nn.Dense(2 * D)(x)))


class Classes(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(5)(x.mean(1))


def vit() -> Model:
    images = jax.ShapeDtypeStruct((B, 4, 4, 3), jnp.float32)
    patches = jax.ShapeDtypeStruct((B, 4, D), jnp.float32)
    return by_hand(
        "vit",
        from_linen("patches", Patches(), example=(images,), reads=("images",)),
        from_linen("block", EncoderBlock(), example=(patches,), uses_key=True),
        from_linen("classes", Classes(), example=(patches,)),
        loss_layer(),
        images=images,
        targets=jax.ShapeDtypeStruct((B,), jnp.int32),
    )


# --- 3. T5: encoder and decoder in one module, embedding used three times -----------------------------------------------


class Attend(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, y: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        return x + nn.MultiHeadDotProductAttention(H, use_bias=False)(nn.RMSNorm()(x), y, mask=mask)


class DecoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array, bias: jax.Array, mask: jax.Array) -> jax.Array:
        return Attend()(Attend()(x, x, mask), encoded) + bias


class T5(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        embed = nn.Embed(V, D)
        bias = self.param("bias", nn.initializers.normal(), (1, T, D))
        x = embed(tokens)
        mask = nn.make_attention_mask(tokens > 0, tokens > 0)
        x = Attend(name="encoder_0")(x, x, mask)
        encoded = nn.RMSNorm()(x)
        y = embed(jnp.pad(targets[:, :-1], ((0, 0), (1, 0))))
        y = DecoderBlock(name="decoder_0")(y, encoded, bias, nn.make_causal_mask(targets))
        return embed.attend(nn.RMSNorm()(y))  # type: ignore[no-any-return]


def t5() -> Model:
    batch = {"tokens": TOKENS, "targets": TOKENS}
    return layers_from_linen(T5(), ["encoder", "decoder"], batch=batch, reads=("tokens", "targets"), loss=cross_entropy)


# --- 4. Mixture of experts, top 2, with a loss that balances them -------------------------------------------------------


class Experts(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, experts: int = 3) -> None:
        self.router = nnx.Linear(D, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (experts, D, 2 * D)) * 0.3)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (experts, 2 * D, D)) * 0.3)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        share = jax.nn.softmax(self.router(x))  # [B, T, E]
        best, which = jax.lax.top_k(share, 2)
        gate = jnp.sum(jax.nn.one_hot(which, share.shape[-1]) * best[..., None], axis=-2)
        hidden = jax.nn.silu(jnp.einsum("btd,edf->btef", x, self.up[...]))
        y = jnp.einsum("btef,efd,bte->btd", hidden, self.down[...], gate)
        balance = jnp.sum(share.mean((0, 1)) * (gate > 0).mean((0, 1)))
        return x + y, balance


class MoE(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([Experts(rngs) for _ in range(2)])
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> dict[str, jax.Array]:
        x, balance = self.embed(tokens), jnp.float32(0)
        for layer in self.layers:
            x, layer_balance = layer(x)
            balance += layer_balance
        return {"logits": self.head(x), "balance": balance}


def moe() -> Model:
    def loss(output: Any, batch: Mapping[str, jax.Array]) -> Any:
        total, weight = cross_entropy(output["logits"], batch)
        return total + 0.1 * weight * output["balance"], weight

    batch = {"tokens": TOKENS, "targets": TOKENS}
    return layers_from_nnx(MoE, batch=batch, reads=("tokens",), loss=loss)


# --- 5. Widths that change, nn.scan and nn.remat within a layer, dropout, tied embedding --------------------------------


class Wide(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        class Body(nn.Module):
            width: int

            @nn.compact
            def __call__(self, h: jax.Array, _: None) -> tuple[jax.Array, None]:
                return h + nn.Dropout(0.2, deterministic=not train)(jnp.tanh(nn.Dense(self.width)(h))), None

        scanned = nn.scan(
            nn.remat(Body), variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=2
        )
        return scanned(self.width)(nn.Dense(self.width)(x), None)[0]  # type: ignore[no-any-return]


class Logits(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Embed(V, D, name="embed").attend(nn.Dense(D)(x))  # type: ignore[no-any-return]


def widths() -> Model:
    def layer(name: str, before: int, width: int) -> Layer:
        return from_linen(
            name, Wide(width), example=(jax.ShapeDtypeStruct((B, T, before), jnp.float32),), uses_key=True
        )

    return by_hand(
        "widths",
        from_linen("embed", nn.Embed(V, D), example=(TOKENS,), reads=("tokens",)),
        layer("wide", D, 2 * D),
        layer("narrow", 2 * D, D // 2),
        from_linen(
            "head",
            Logits(),
            example=(jax.ShapeDtypeStruct((B, T, D // 2), jnp.float32),),
            tied={("embed", "embedding"): ("embed", ("embedding",))},
        ),
        loss_layer(),
        tokens=TOKENS,
        targets=TOKENS,
    )


# --- 6, 7. nnx.scan over stacked blocks: cut into them; and with nnx.remat and nnx.jit, as one layer ---------------------


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.linear = nnx.Linear(D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.dropout(jnp.tanh(self.linear(self.norm(x))))


def stack(rngs: nnx.Rngs, size: int) -> Block:
    @nnx.split_rngs(splits=size)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> Block:
        return Block(rngs)

    return make(rngs)  # type: ignore[no-any-return]


class Scanned(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.layers = stack(rngs, 2)
        self.head = nnx.Linear(D, V, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return self.head(run(self.embed(tokens), self.layers))


def scanned() -> Model:
    batch = {"tokens": TOKENS, "targets": TOKENS}
    return layers_from_nnx(Scanned(nnx.Rngs(0)), "layers", batch=batch, reads=("tokens",), loss=cross_entropy)


class Stack(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = stack(rngs, 2)

    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def run(x: jax.Array, block: Block) -> jax.Array:
            return block(x)

        return run(x, self.layers)  # type: ignore[no-any-return]


def scan_layers() -> Model:
    return by_hand(
        "scan_layers",
        from_nnx("embed", lambda rngs: nnx.Embed(V, D, rngs=rngs), reads=("tokens",)),
        from_nnx("stack", Stack),
        from_nnx("head", lambda rngs: nnx.Linear(D, V, rngs=rngs)),
        loss_layer(),
        tokens=TOKENS,
        targets=TOKENS,
    )


# --- 8. lm1b: packed examples, with positions and segments that say what may see what ------------------------------------


class LM1BBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:
        h = nn.MultiHeadDotProductAttention(H, use_bias=False, dropout_rate=0.2)(
            nn.LayerNorm(use_bias=False)(x), mask=mask, deterministic=deterministic
        )
        return x + h


class LM1B(nn.Module):
    @nn.compact
    def __call__(self, inputs: jax.Array, positions: jax.Array, segments: jax.Array, train: bool) -> jax.Array:
        mask = nn.combine_masks(
            nn.make_causal_mask(inputs), nn.make_attention_mask(segments, segments, jnp.equal, dtype=bool)
        )
        table = np.sin(np.arange(T)[:, None] * np.arange(1, D + 1)[None], dtype=np.float32)
        embed = nn.Embed(V, D, name="shared_embedding")
        x = embed(inputs) + jnp.take(table, positions, axis=0)
        x = nn.Dropout(0.2)(x, deterministic=not train)
        for k in range(1):
            x = LM1BBlock(name=f"encoderdecoderblock_{k}")(x, mask, not train)
        return nn.Dense(V, name="logitdense")(nn.LayerNorm(name="encoderdecoder_norm")(x))


def lm1b() -> Model:
    batch = dict.fromkeys(("inputs", "positions", "segments", "targets"), TOKENS)
    reads = ("inputs", "positions", "segments")
    return layers_from_linen(LM1B(), "encoderdecoderblock", batch=batch, reads=reads, loss=cross_entropy)


# --- 9. Gemma: grouped queries, GeGLU, local and global attention in turn, capped logits ---------------------------------


class GemmaBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, window: int | None) -> None:
        self.window = window
        self.norm = nnx.RMSNorm(D, rngs=rngs)
        self.q = nnx.LinearGeneral(D, (H, D // H), use_bias=False, rngs=rngs)
        self.kv = nnx.LinearGeneral(D, (2, 1, D // H), use_bias=False, rngs=rngs)
        self.o = nnx.LinearGeneral((H, D // H), D, axis=(-2, -1), use_bias=False, rngs=rngs)
        self.gate_up = nnx.LinearGeneral(D, (2, 2 * D), use_bias=False, rngs=rngs)
        self.down = nnx.Linear(2 * D, D, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, positions: jax.Array, cache: None, mask: jax.Array) -> tuple[None, jax.Array]:
        h = self.norm(x)
        (k, v), q = jnp.moveaxis(self.kv(h), -3, 0), self.q(h)
        if self.window is not None:
            near = positions[:, :, None] - positions[:, None, :] < self.window
            mask = mask & near[:, None]
        x = x + self.o(jax.nn.dot_product_attention(q, k, v, mask=mask))
        gate, up = jnp.moveaxis(self.gate_up(x), -2, 0)
        return cache, x + self.down(jax.nn.gelu(gate) * up)


class Gemma(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedder = nnx.Embed(V, D, rngs=rngs)
        self.layers = nnx.List([GemmaBlock(rngs, window) for window in (2, None)])
        self.final_norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        mask = jnp.tril(jnp.ones((1, 1, tokens.shape[1], tokens.shape[1]), bool)) & (tokens > 0)[:, None, None, :]
        mask = mask | jnp.eye(tokens.shape[1], dtype=bool)[None, None]
        x = self.embedder(tokens) * jnp.sqrt(jnp.float32(D))
        for layer in self.layers:
            _, x = layer(x, positions, None, mask)
        logits = self.embedder.attend(self.final_norm(x))
        return jnp.tanh(logits / 30.0) * 30.0


def gemma() -> Model:
    batch = {"tokens": TOKENS, "targets": TOKENS}
    return layers_from_nnx(Gemma, batch=batch, reads=("tokens",), loss=cross_entropy)


# --- 10. MLP-Mixer ------------------------------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(nn.Dense(x.shape[1], name="token_mixing")(nn.gelu(y)), 1, 2)
        return x + nn.Dense(D, name="channel_mixing")(nn.LayerNorm()(x))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        x = nn.Conv(D, (2, 2), strides=(2, 2), name="stem")(images)
        x = x.reshape(len(x), -1, D)
        for _ in range(1):
            x = MixerBlock()(x)
        return nn.Dense(5, name="head")(jnp.mean(nn.LayerNorm(name="pre_head_layer_norm")(x), axis=1))


def mixer() -> Model:
    batch = {
        "images": jax.ShapeDtypeStruct((B, 4, 4, 3), jnp.float32),
        "targets": jax.ShapeDtypeStruct((B,), jnp.int32),
    }
    return layers_from_linen(Mixer(), "MixerBlock", batch=batch, reads=("images",), loss=cross_entropy)


# --- 11. U-Net: what goes down is added on the way up --------------------------------------------------------------------


class Down(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(width, 2 * width, (3, 3), strides=2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.silu(self.conv(x))


class Up(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.conv = nnx.ConvTranspose(2 * width, width, (2, 2), strides=(2, 2), rngs=rngs)

    def __call__(self, x: jax.Array, skip: jax.Array, time: jax.Array) -> jax.Array:
        return jnp.tanh(self.conv(x) + skip) * time[:, None, None, None]


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(1, 2, (1, 1), rngs=rngs)
        self.down = nnx.List([Down(2, rngs), Down(4, rngs)])
        self.up = nnx.List([Up(4, rngs), Up(2, rngs)])
        self.out = nnx.Conv(2, 1, (1, 1), rngs=rngs)

    def __call__(self, noisy: jax.Array, time: jax.Array) -> jax.Array:
        x = self.stem(noisy)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        scale = jnp.cos(time)
        for up in self.up:
            x = up(x, skips.pop(), scale)
        return self.out(x)  # type: ignore[no-any-return]


def unet() -> Model:
    def loss(output: jax.Array, batch: Mapping[str, jax.Array]) -> Any:
        return jnp.sum((output - batch["noise"]) ** 2), jnp.float32(output.size)

    image = jax.ShapeDtypeStruct((B, 4, 4, 1), jnp.float32)
    batch = {"noisy": image, "noise": image, "time": jax.ShapeDtypeStruct((B,), jnp.float32)}
    return layers_from_nnx(UNet, ("down", "up"), batch=batch, reads=("noisy", "time"), loss=loss)


# --- 12. Two directions of recurrent cells that tag a sequence -----------------------------------------------------------


class Tagger(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, lengths: jax.Array, train: bool) -> jax.Array:
        forward, backward = nn.RNN(nn.OptimizedLSTMCell(D // 2)), nn.RNN(nn.GRUCell(D // 2))
        y = nn.Bidirectional(forward, backward)(x, seq_lengths=lengths)
        return nn.Dropout(0.2, deterministic=not train)(y)


def lstm() -> Model:
    lengths = jax.ShapeDtypeStruct((B,), jnp.int32)
    return by_hand(
        "lstm",
        from_linen("embed", nn.Embed(V, D), example=(TOKENS,), reads=("tokens",)),
        from_linen("lstm", Tagger(), example=(X, lengths), reads=("lengths",), uses_key=True),
        from_linen("head", nn.Dense(V), example=(X,)),
        loss_layer(),
        tokens=TOKENS,
        lengths=lengths,
        targets=TOKENS,
    )


# --- 13. A variational autoencoder that draws its own noise --------------------------------------------------------------


class Encode(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(9, D, rngs=rngs)
        self.mean, self.log_std = nnx.Linear(D, 3, rngs=rngs), nnx.Linear(D, 3, rngs=rngs)

    def __call__(self, images: jax.Array) -> dict[str, jax.Array]:
        h = jax.nn.relu(self.linear(images))
        return {"mean": self.mean(h), "log_std": self.log_std(h)}


class Sample(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.noise = rngs.noise.fork() if "noise" in rngs else rngs.params.fork()

    def __call__(self, x: dict[str, jax.Array], train: bool) -> dict[str, jax.Array]:
        noise = jax.random.normal(self.noise(), x["mean"].shape) if train else jnp.zeros_like(x["mean"])
        return {**x, "z": x["mean"] + jnp.exp(x["log_std"]) * noise}


class Decode(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.up, self.out = nnx.Linear(3, D, rngs=rngs), nnx.Linear(D, 9, rngs=rngs)

    def __call__(self, x: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return {**x, "logits": self.out(jax.nn.relu(self.up(x["z"])))}


def vae() -> Model:
    def loss(x: Mapping[str, jax.Array], batch: Mapping[str, jax.Array]) -> Any:
        nats = jax.nn.softplus(x["logits"]) - batch["images"] * x["logits"]
        divergence = 0.5 * (jnp.exp(2 * x["log_std"]) + x["mean"] ** 2 - 1) - x["log_std"]
        return jnp.sum(nats) + jnp.sum(divergence), jnp.float32(len(x["mean"]))

    return by_hand(
        "vae",
        from_nnx("encode", Encode, reads=("images",)),
        from_nnx("sample", Sample),
        from_nnx("decode", Decode),
        loss_layer(loss, "images"),
        images=jax.ShapeDtypeStruct((B, 9), jnp.float32),
    )


MODELS: Mapping[str, Callable[[], Model]] = {
    m.__name__: m for m in (nnx_gpt, vit, t5, moe, widths, scanned, scan_layers, lm1b, gemma, mixer, unet, lstm, vae)
}


def random_batch(model: Model, microbatches: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return arrays ``[microbatches, B, …]``: small positive integers, normal floats."""
    rng = np.random.default_rng(seed)
    return {
        name: (
            rng.integers(1, 5, (microbatches, *aval.shape))
            if np.issubdtype(aval.dtype, np.integer)
            else rng.normal(size=(microbatches, *aval.shape))
        ).astype(aval.dtype)
        for name, aval in model.batch_spec(B).items()
    }
