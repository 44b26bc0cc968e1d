"""Flax modules cut at their blocks compute what they compute whole; weights go in and out; what can't be cut is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxpipe.errors import StageError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.adapters import layers_from_linen
from jaxpipe.stage.model.cut_module import CutModel
from jaxpipe.stage.model.cut_nnx import layers_from_nnx, module_params, update_module
from jaxpipe.stage.model.layer import LayerContext
from jaxpipe.stage.model.reference import apply_model, init_params, logits
from tests.support import foreign_models as foreign
from tests.support.foreign_models import TOKENS, B, D, T, V, cross_entropy

BATCH = {"tokens": TOKENS, "targets": TOKENS}
KEY = jax.random.key(0)


def one(model: Any, seed: int = 0) -> dict[str, np.ndarray]:
    return {name: v[0] for name, v in foreign.random_batch(model, 1, seed).items()}


def cut(module: Any, blocks: Any = "layers", **options: Any) -> CutModel:
    return layers_from_nnx(module, blocks, batch=BATCH, reads=("tokens",), loss=cross_entropy, **options)


def assert_alike(got: Any, expected: Any, tolerance: float = 2e-6) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), jax.tree_util.keystr(path)


# --- what is computed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "module"), [("nnx_gpt", foreign.NnxGPT), ("scanned", foreign.Scanned), ("unet", foreign.UNet)]
)
def test_an_nnx_module_computes_what_it_computes_whole(name: str, module: Callable[[nnx.Rngs], nnx.Module]) -> None:
    """Loss and gradients in evaluation mode (no dropout), and weights there and back, bit for bit."""
    original = module(nnx.Rngs(3))
    model = foreign.MODELS[name]()
    assert isinstance(model, CutModel)
    batch, params = one(model), model.by_layer(module_params(original))
    original.eval()
    reads, loss = model.layers[0].reads, model.layers[-1].apply

    @nnx.jit
    def whole_loss(full_module: Any) -> Any:
        return nnx.value_and_grad(lambda m: loss({}, m(*(batch[n] for n in reads)), LayerContext(batch))[0])(
            full_module
        )

    expected, expected_grads = whole_loss(original)
    got, grads = jax.jit(jax.value_and_grad(lambda p: apply_model(model, p, batch, train=False)[0]))(params)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert_alike(model.whole(grads), strings(nnx.to_pure_dict(expected_grads)))
    copy = module(nnx.Rngs(4))
    update_module(copy, model.whole(params))
    jax.tree.map(np.testing.assert_array_equal, module_params(copy), module_params(original))


def strings(tree: Any) -> Any:
    return {str(k): strings(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


@pytest.mark.parametrize(
    ("name", "module"), [("t5", foreign.T5()), ("lm1b", foreign.LM1B()), ("mixer", foreign.Mixer())]
)
def test_a_linen_module_computes_what_it_computes_whole(name: str, module: Any) -> None:
    model = foreign.MODELS[name]()
    assert isinstance(model, CutModel)
    batch = one(model)
    arrays = [batch[n] for n in model.layers[0].reads]
    mode = {"train": False} if name != "t5" else {}
    weights = module.init(KEY, *arrays, **mode)["params"]

    def whole_loss(weights: Any) -> Any:
        return cross_entropy(module.apply({"params": weights}, *arrays, **mode), batch)[0]

    expected, expected_grads = jax.jit(jax.value_and_grad(whole_loss))(weights)
    params = model.by_layer(weights)
    got, grads = jax.jit(jax.value_and_grad(lambda p: apply_model(model, p, batch, train=False)[0]))(params)
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    assert_alike(model.whole(grads), expected_grads)
    jax.tree.map(np.testing.assert_array_equal, model.whole(params), weights)


class ScannedLinen(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, train: bool = False) -> jax.Array:
        class Body(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array, mask: jax.Array, scale: float) -> tuple[jax.Array, None]:
                h = jnp.tanh(nn.Dense(D)(x)) * mask[..., None] * scale
                return x + nn.Dropout(0.5, deterministic=not train)(h), None

        options = {"variable_axes": {"params": 0}, "split_rngs": {"params": True, "dropout": True}}
        stack = nn.scan(nn.remat(Body), length=3, in_axes=(nn.broadcast, nn.broadcast), **options)
        x, _ = stack(name="layers")(nn.Embed(V, D)(tokens), tokens > 1, 0.5)
        return nn.Dense(V)(x)


def test_a_stack_that_linen_scans_over_becomes_its_blocks() -> None:
    module = ScannedLinen()
    model = layers_from_linen(module, "layers", batch=BATCH, reads=("tokens",), loss=cross_entropy)
    assert [layer.name for layer in model.layers] == ["embed", "block_00", "block_01", "block_02", "head", "loss"]
    assert [layer.uses_key for layer in model.layers] == [False, True, True, True, False, False]
    batch = one(model)
    weights = module.init(KEY, batch["tokens"])["params"]

    def whole_loss(weights: Any) -> Any:
        return cross_entropy(module.apply({"params": weights}, batch["tokens"]), batch)[0]

    expected = jax.jit(jax.grad(whole_loss))(weights)
    params = model.by_layer(weights)
    got = jax.jit(jax.grad(lambda p: apply_model(model, p, batch, train=False)[0]))(params)
    assert_alike(model.whole(got), expected)
    jax.tree.map(np.testing.assert_array_equal, model.whole(params), weights)


def test_what_flows_between_layers_is_read_off_the_call() -> None:
    model = foreign.t5()
    assert [layer.name for layer in model.layers] == ["embed", "block_00", "between_01", "block_01", "head", "loss"]
    embedding = ("Embed_0", "embedding")
    ties = {layer.name: dict(layer.tied) for layer in model.layers if layer.tied}
    assert ties == {"between_01": {embedding: ("embed", embedding)}, "head": {embedding: ("embed", embedding)}}
    gemma = foreign.gemma()
    blocks = {layer.name: layer for layer in gemma.layers}
    assert blocks["block_00"].apply is not blocks["block_01"].apply, "one has a window"
    assert blocks["block_00"].reads == ("tokens",), "it makes its mask from the batch"
    gpt = cut(foreign.NnxGPT(nnx.Rngs(0), blocks=3), "blocks")
    assert len({layer.apply for layer in gpt.layers if layer.name.startswith("block")}) == 1
    assert gpt.vocab_size == V and gpt.seq_len == T
    x = gpt.layers[0].apply(gpt.layers[0].init(KEY), None, LayerContext(one(gpt), KEY))
    assert isinstance(x, tuple) and [leaf.shape for leaf in x] == [(B, T, D)]


def test_values_of_an_instance_and_fresh_ones_of_a_function() -> None:
    gpt = foreign.NnxGPT(nnx.Rngs(3))
    params = init_params(cut(gpt, "blocks"), 0)
    jax.tree.map(np.testing.assert_array_equal, cut(gpt, "blocks").whole(params), module_params(gpt))
    fresh = cut(lambda rngs: foreign.NnxGPT(rngs), "blocks")
    a, b = init_params(fresh, 0), init_params(fresh, 1)
    kernels = [p[f"block_0{i}"]["qkv"]["kernel"] for p in (a, b) for i in range(2)]
    assert all(not np.array_equal(x, y) for k, x in enumerate(kernels) for y in kernels[:k])
    assert float(np.std(kernels[0])) == pytest.approx(
        float(np.std(module_params(gpt)["blocks"]["0"]["qkv"]["kernel"])), rel=0.3
    )


@pytest.mark.soak
def test_shorter_sequences_than_the_example() -> None:
    """Masks and positions that blocks receive are made for the batch at hand."""
    model = foreign.gemma()
    params, tokens = init_params(model, 0), np.arange(1, 7, dtype=np.int32).reshape(1, 6)
    full, short = (logits(model, params, jnp.asarray(t)) for t in (tokens, tokens[:, :4]))
    np.testing.assert_allclose(short, full[:, :4], rtol=1e-5, atol=1e-6)


def test_numbers_that_blocks_are_given_are_those_of_the_batch_at_hand() -> None:
    """A number may come from the batch's shape, and the same array may be given twice."""

    class Scaled(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(D, D, rngs=rngs)

        def __call__(self, x: jax.Array, y: jax.Array, length: int) -> jax.Array:
            return x + self.linear(y) / length

    class Numbered(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.layers = nnx.List([Scaled(rngs) for _ in range(2)])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x, x, tokens.shape[1])
            return self.embed.attend(x)  # type: ignore[no-any-return]

    module = Numbered(nnx.Rngs(0))
    model = cut(module)
    params, tokens = init_params(model, 0), jnp.asarray(one(model)["tokens"])
    for batch in (tokens, tokens[:, :3]):
        np.testing.assert_allclose(logits(model, params, batch), module(batch), rtol=1e-5, atol=1e-6)
    x = model.layers[0].apply(params["embed"], None, LayerContext({"tokens": tokens}))
    assert len(x) == 1, "what is given twice flows once"


def test_a_first_block_that_reads_the_batch_and_none_after_the_last() -> None:
    """Nothing is computed before the first block, so there is no layer for it."""

    class Chain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layers = nnx.List([nnx.Embed(V, D, rngs=rngs), foreign.Block(rngs), nnx.Linear(D, V, rngs=rngs)])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = tokens
            for layer in self.layers:
                x = layer(x)
            return x

    model = cut(Chain)
    assert [layer.name for layer in model.layers] == ["block_00", "block_01", "block_02", "head", "loss"]
    params, batch = init_params(model, 0), foreign.random_batch(model, 2)
    pipe = Pipeline.build(model, generate("1f1b", 2, 2), microbatch_size=B, boundaries=[(0, 1), (1, 5)])
    keys = [jax.random.fold_in(KEY, i) for i in range(2)]

    def mean(params: Any) -> Any:
        parts = [apply_model(model, params, {n: v[i] for n, v in batch.items()}, keys[i]) for i in range(2)]
        return sum(a for a, _ in parts) / sum(b for _, b in parts)

    assert_alike(pipe.loss_and_grads(pipe.place(params), batch, KEY)[1], jax.jit(jax.grad(mean))(params))


def test_calls_that_depend_on_the_shape_are_refused_at_others() -> None:
    def by_length(m: Any, tokens: jax.Array) -> jax.Array:
        x = m.embed(tokens)
        for layer in m.layers if tokens.shape[1] == T else list(m.layers)[:2]:
            x = layer(x)
        return x if tokens.shape[1] == T else m.embed.attend(x)  # type: ignore[no-any-return]

    model = cut(Odd(nnx.Rngs(0), by_length))
    params, tokens = init_params(model, 0), jnp.asarray(one(model)["tokens"])
    with pytest.raises(StageError, match="Odd calls its blocks otherwise for a batch of other shapes"):
        logits(model, params, tokens[:, :3])


def test_a_cast_between_blocks_is_kept_whatever_the_dtype() -> None:
    """The module widens what its blocks narrow; in float32 nothing of that is seen."""

    class Widening(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.embed = nnx.Embed(V, D, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(D, D, dtype=dtype, rngs=rngs) for dtype in (None, jnp.float32)])

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for layer in self.layers:
                x = x + layer(x.astype(jnp.float32)).astype(jnp.float32)
            return x

    model = layers_from_nnx(Widening, batch=BATCH, reads=("tokens",), loss=cross_entropy)
    params = jax.tree.map(lambda a: a.astype(jnp.bfloat16), init_params(model, 0))
    module, batch = Widening(nnx.Rngs(0)), one(model)
    update_module(module, model.whole(params))
    expected = cross_entropy(module(batch["tokens"]), batch)[0]
    np.testing.assert_allclose(apply_model(model, params, batch)[0], expected, rtol=1e-6)


def test_shards_of_a_batch_and_scalars_that_flow() -> None:
    """Two shards of each microbatch: each has a balance loss of its own."""
    model = foreign.moe()
    params = init_params(model, 0)
    halves = foreign.random_batch(model, 4)
    batch = {n: v.reshape(2, 2 * B, *v.shape[2:]) for n, v in halves.items()}
    pipe = Pipeline.build(model, generate("1f1b", 2, 2), microbatch_size=2 * B, dp=2)
    _, grads = pipe.loss_and_grads(pipe.place(params), batch)

    def mean(params: Any) -> Any:
        parts = [apply_model(model, params, {n: v[i] for n, v in halves.items()}) for i in range(4)]
        return sum(a for a, _ in parts) / sum(b for _, b in parts)

    assert_alike(grads, jax.jit(jax.grad(mean))(params))


# --- what is refused ----------------------------------------------------------------------------------------------------


class Odd(nnx.Module):
    """Blocks, and a call that a test gives."""

    def __init__(self, rngs: nnx.Rngs, call: Callable[[Any, jax.Array], jax.Array]) -> None:
        self.call = call
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.layers = nnx.List([foreign.Block(rngs) for _ in range(3)])
        self.stacked = foreign.stack(rngs, 2)
        self.norm = nnx.BatchNorm(D, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.call(self, tokens)


def twice(m: Any, tokens: jax.Array) -> jax.Array:
    x = m.embed(tokens)
    for layer in (*m.layers, m.layers[1]):
        x = layer(x)
    return m.embed.attend(x)  # type: ignore[no-any-return]


def skipping(m: Any, tokens: jax.Array) -> jax.Array:
    return m.embed.attend(m.layers[2](m.layers[0](m.embed(tokens))))  # type: ignore[no-any-return]


def branching(m: Any, tokens: jax.Array) -> jax.Array:
    x = m.embed(tokens)
    for layer in m.layers:
        x = jax.lax.cond(tokens[0, 0] > 2, layer, lambda x: x, x)
    return m.embed.attend(x)  # type: ignore[no-any-return]


def batching(m: Any, tokens: jax.Array) -> jax.Array:
    x = m.embed(tokens)
    for layer in m.layers:
        x = jax.vmap(layer)(x)
    return m.embed.attend(x)  # type: ignore[no-any-return]


def failing(m: Any, tokens: jax.Array) -> jax.Array:
    return m.embed(tokens) @ jnp.zeros((3, 5))  # type: ignore[no-any-return]


def remembering_noise(m: Any, tokens: jax.Array) -> jax.Array:
    noisy = m.dropout(m.embed(tokens))
    x = noisy * 2
    for layer in m.layers:
        x = layer(x)
    return m.embed.attend(x + noisy)  # type: ignore[no-any-return]


def by_mode(m: Any, tokens: jax.Array) -> jax.Array:
    x = m.embed(tokens)
    layers = list(m.layers)
    for layer in layers if m.dropout.deterministic else reversed(layers):
        x = layer(x)
    return m.embed.attend(x)  # type: ignore[no-any-return]


def normed(m: Any, tokens: jax.Array) -> jax.Array:
    x = m.norm(m.embed(tokens))
    for layer in m.layers:
        x = layer(x)
    return m.embed.attend(x)  # type: ignore[no-any-return]


def collecting(m: Any, tokens: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def run(x: jax.Array, block: Any) -> tuple[jax.Array, jax.Array]:
        x = block(x)
        return x, x

    x, block_outputs = run(m.embed(tokens), m.stacked)
    return m.embed.attend(x + block_outputs.sum(0))  # type: ignore[no-any-return]


def working_in_between(m: Any, tokens: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x: jax.Array, block: Any) -> jax.Array:
        return block(x * 2)  # type: ignore[no-any-return]

    return m.embed.attend(run(m.embed(tokens), m.stacked))  # type: ignore[no-any-return]


def reading_the_stack(m: Any, tokens: jax.Array) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x: jax.Array, block: Any) -> jax.Array:
        return block(x)  # type: ignore[no-any-return]

    return m.embed.attend(run(m.embed(tokens), m.stacked)) + m.stacked.linear.bias.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("call", "blocks", "message"),
    [
        (twice, "layers", "block 1 is called more than once; blocks are called once each"),
        (skipping, "layers", r"does not call block 1 \(layers/1\); write the layers by hand"),
        (branching, "layers", "block 0 is called inside cond"),
        (batching, "layers", "block 0 is called inside vmap"),
        (failing, "layers", "Odd can't be traced: TypeError: dot_general requires"),
        (remembering_noise, "layers", "random numbers drawn before block 2 are used after it outside of blocks"),
        (by_mode, "layers", "calls its blocks otherwise in evaluation, or in bfloat16, than in training"),
        (normed, "layers", r"nnx module Odd changes its state norm/mean \(BatchStat\) in a call"),
        (collecting, "stacked", "what its scan collects from the blocks is used afterwards"),
        (working_in_between, "stacked", "block 0 is given something else than its scan carries from block to block"),
        (reading_the_stack, "stacked", "reads stacked/linear/bias, which its blocks share out, outside of them"),
        (twice, "blocks", "has no blocks at 'blocks'; its attributes there are dropout, embed, layers, norm, stacked"),
        (twice, "embed.embedding", "has no blocks at 'embed.embedding'"),
        (twice, "dropout", "one module is a stack of blocks if axis 0 of all its parameters counts them"),
    ],
    ids=lambda v: getattr(v, "__name__", None),
)
def test_an_nnx_module_that_can_not_be_cut_is_refused(call: Any, blocks: str, message: str) -> None:
    with pytest.raises(StageError, match=message) as error:
        cut(Odd(nnx.Rngs(0), call), blocks)
    assert "\n" not in str(error.value) and "layers_from_nnx: nnx module Odd" in str(error.value)


def test_a_linen_module_that_can_not_be_cut_is_refused() -> None:
    class Stateful(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array, train: bool) -> jax.Array:
            return nn.Dense(V)(nn.BatchNorm(use_running_average=not train)(nn.Embed(V, D)(tokens)))

    class Lent(nn.Module):
        """Its blocks are made with a module of its own."""

        def setup(self) -> None:
            self.embed = nn.Embed(V, D)
            self.layers = [Borrower(self.embed) for _ in range(2)]

        def __call__(self, tokens: jax.Array) -> jax.Array:
            x = self.embed(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.embed.attend(x)  # type: ignore[no-any-return]

    def refused(module: Any, blocks: str, message: str) -> None:
        with pytest.raises(StageError, match=message):
            layers_from_linen(module, blocks, batch=BATCH, reads=("tokens",), loss=cross_entropy)

    refused(Stateful(), "Dense", r"keeps state beside its parameters \(batch_stats\)")
    refused(ScannedLinen(), "blocks", "has no blocks 'blocks'; its parameters there are Dense_0, Embed_0, layers")
    refused(ScannedLinen, "layers", "wants an instance of a linen module")
    refused(Lent(), "layers", "block layers_0 is made with embed=Embed, which belongs to the rest of the module")


class Borrower(nn.Module):
    embed: nn.Module

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dense(D)(x) @ self.embed.embedding.T @ self.embed.embedding  # type: ignore[no-any-return]


def test_weights_that_do_not_fit_are_refused() -> None:
    model, gpt = foreign.nnx_gpt(), foreign.NnxGPT(nnx.Rngs(0))
    with pytest.raises(StageError, match="has no parameter blocks/0/"):
        model.by_layer({"embed": module_params(gpt)["embed"]})
    weights = module_params(gpt)
    with pytest.raises(StageError, match=r"embed/embedding.*\(13, 8\).*\(2,\)"):
        update_module(gpt, {**weights, "embed": {"embedding": jnp.ones(2)}})
    before = module_params(gpt)
    for params, message in (
        ({"upp": jnp.ones(2)}, "nnx module NnxGPT has no parameter 'upp'; give what module_params gives"),
        ({**weights, "embedd": {"embedding": 0}}, "no parameter 'embedd/embedding'; did you mean 'embed/embedding'"),
        ({"embed": {"embedding": jnp.zeros((V, D)), "bias": 0}}, "has no parameter 'embed/bias'"),
        ({"embed": jnp.zeros((V, D))}, "has no parameter 'embed'; did you mean"),
    ):
        with pytest.raises(StageError, match=message):
            update_module(gpt, params)
    jax.tree.map(np.testing.assert_array_equal, module_params(gpt), before)
    update_module(gpt, {"embed": {"embedding": jnp.zeros((V, D))}})
    assert not module_params(gpt)["embed"]["embedding"].any(), "a part is enough"


def test_parameters_that_are_not_the_linen_modules_are_refused() -> None:
    module = ScannedLinen()
    weights = module.init(KEY, jnp.asarray(one_tokens()))["params"]
    dense = weights["Dense_0"]

    def refused(params: Any, message: str) -> None:
        with pytest.raises(StageError, match=message) as error:
            layers_from_linen(module, "layers", batch=BATCH, reads=("tokens",), loss=cross_entropy, params=params)
        assert "\n" not in str(error.value) and "layers_from_linen: linen module ScannedLinen" in str(error.value)

    refused({"params": weights}, r'params= holds \{"params": …\}; give what is in it')
    refused({**weights, "Dense_0": {"bias": dense["bias"]}}, "params= lacks Dense_0/kernel")
    refused({}, "params= lacks Dense_0/")
    refused({**weights, "Dense_1": dense}, "has no parameter 'Dense_1/.*; did you mean 'Dense_0/")
    refused({**weights, "Dense_0": {**dense, "bias": jnp.ones(2)}}, r"parameter Dense_0/bias has shape .*, got \(2,\)")


def one_tokens() -> np.ndarray:
    return np.arange(2 * T, dtype=np.int32).reshape(2, T) % V


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_examples_may_be_lists_and_what_is_no_batch_is_refused(flax: str) -> None:
    def cut_for(batch: Any, reads: Any = ("tokens",)) -> CutModel:
        options = {"batch": batch, "reads": reads, "loss": cross_entropy}
        if flax == "nnx":
            return layers_from_nnx(foreign.NnxGPT(nnx.Rngs(0)), "blocks", **options)
        return layers_from_linen(ScannedLinen(), "layers", **options)

    tokens = one_tokens()
    model = cut_for({"tokens": tokens.tolist(), "targets": tokens})
    assert model.batch_spec(3) == {n: jax.ShapeDtypeStruct((3, T), jnp.int32) for n in ("tokens", "targets")}
    for batch, message in (
        ({"tokens": [[1, 2], [3]]}, "'tokens' in the batch is a list that is no array of numbers; give an array"),
        ({"tokens": tokens, "targets": ["a", "b"]}, "'targets' in the batch is a list that is no array of numbers"),
        ({"tokens": tokens, "scale": 2.0}, "'scale' in the batch is one number; give an array, batch axis first"),
        ({"targets": tokens}, "reads 'tokens', and the batch has targets"),
        (tokens, "batch= is a ndarray; want a dict of arrays by name"),
    ):
        with pytest.raises(StageError, match=message) as error:
            cut_for(batch)
        assert "\n" not in str(error.value)


def test_a_flax_module_of_the_other_sort_is_refused_in_one_line() -> None:
    gpt, options = foreign.NnxGPT(nnx.Rngs(0)), {"batch": BATCH, "reads": ("tokens",), "loss": cross_entropy}
    with pytest.raises(StageError, match=r"from_linen.*layers_from_linen"):
        layers_from_nnx(ScannedLinen(), **options)
    with pytest.raises(StageError, match=r"wants an instance of a linen module.*not a NnxGPT$") as error:
        layers_from_linen(gpt, "blocks", **options)
    assert "\n" not in str(error.value)


def test_parameters_on_several_devices_become_the_modules_own() -> None:
    """A stack's blocks lie on different devices; also while JAX traces."""
    module = ScannedLinen()
    model = layers_from_linen(module, "layers", batch=BATCH, reads=("tokens",), loss=cross_entropy)
    params = init_params(model, 0)
    devices = jax.devices()
    spread = {name: jax.device_put(tree, devices[i % len(devices)]) for i, (name, tree) in enumerate(params.items())}
    assert len({d for leaf in jax.tree.leaves(spread) for d in leaf.devices()}) > 1
    variables = model.whole(spread)
    jax.tree.map(np.testing.assert_array_equal, variables, jax.jit(model.whole)(params))
    tokens = jnp.asarray(one_tokens())
    expected = module.apply({"params": model.whole(params)}, tokens)
    np.testing.assert_array_equal(module.apply({"params": variables}, tokens), expected)
    back = model.by_layer(variables)
    assert {name for name in params if params[name]} <= set(back)
    jax.tree.map(np.testing.assert_array_equal, back, {name: params[name] for name in back})


def test_a_models_repr_is_one_short_line() -> None:
    gpt = foreign.nnx_gpt()
    assert repr(gpt) == f"CutModel({gpt.name!r}, 5 layers: embed, block_00, block_01, head, loss)"
    assert gpt == gpt and gpt != foreign.nnx_gpt()
