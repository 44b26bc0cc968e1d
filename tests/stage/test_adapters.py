"""Flax modules through the adapters give what Flax itself gives; what can't be a layer is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jaxpipe.errors import StageError
from jaxpipe.stage.model.adapters import from_linen, from_nnx
from jaxpipe.stage.model.layer import LayerContext

X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)), jnp.float32)
SHAPE = jax.ShapeDtypeStruct((1, 8), jnp.float32)
EVAL, TRAIN = LayerContext({}, train=False), LayerContext({}, jax.random.key(5))


class LinenMLP(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.relu(nn.Dense(16)(x))
        return nn.Dense(8)(nn.Dropout(self.rate)(x, deterministic=not train))


class NnxMLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, rate: float = 0.0) -> None:
        self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
        self.out = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.out(self.dropout(x))


def is_plain(tree: Any) -> bool:
    if type(tree) is dict:
        return all(type(key) is str and is_plain(value) for key, value in tree.items())
    return isinstance(tree, jax.Array)


# --- linen ------------------------------------------------------------------------------------------------------------


def test_linen_gives_what_flax_gives() -> None:
    module, key = LinenMLP(), jax.random.key(1)
    layer = from_linen("mlp", module, example=(SHAPE,))
    params = layer.init(key)
    expected = jax.jit(lambda key: module.init(key, X, train=False))(key)["params"]
    assert is_plain(params) and jax.tree.structure(params) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    np.testing.assert_array_equal(layer.apply(params, X, EVAL), module.apply({"params": params}, X, train=False))
    ours = jax.grad(lambda p: layer.apply(p, X, EVAL).sum())(params)
    theirs = jax.grad(lambda p: module.apply({"params": p}, X, train=False).sum())(params)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert layer.uses_key is False and layer.reads == ()


def test_linen_dropout_draws_from_the_context_key() -> None:
    module = LinenMLP(0.5)
    layer = from_linen("mlp", module, example=(SHAPE,), uses_key=True)
    params = layer.init(jax.random.key(1))
    expected = module.apply({"params": params}, X, train=True, rngs={"dropout": TRAIN.key})
    np.testing.assert_array_equal(layer.apply(params, X, TRAIN), expected)
    other = layer.apply(params, X, LayerContext({}, jax.random.key(6)))
    assert not jnp.array_equal(other, expected)
    still = layer.apply(params, X, LayerContext({}, jax.random.key(6), train=False))
    np.testing.assert_array_equal(still, module.apply({"params": params}, X, train=False))


def test_linen_reads_data_after_its_input_and_takes_mode_words_of_flax() -> None:
    class Scaled(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, scale: jax.Array, shift: jax.Array, deterministic: bool) -> jax.Array:
            return nn.Dense(8)(x) * scale + (shift if deterministic else -shift)

    one = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    layer = from_linen("scaled", Scaled(), example=(SHAPE, one, one), reads=("scale", "shift"))
    params = layer.init(jax.random.key(0))
    data = {"shift": jnp.full((4, 1), 2.0), "scale": jnp.full((4, 1), 3.0)}
    dense = X @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"][None]
    np.testing.assert_allclose(layer.apply(params, X, LayerContext(data, train=False)), 3 * dense + 2, rtol=1e-5)
    np.testing.assert_allclose(layer.apply(params, X, LayerContext(data, train=True)), 3 * dense - 2, rtol=1e-5)


def test_linen_first_layer_gets_data_alone() -> None:
    tokens = jax.ShapeDtypeStruct((1, 3), jnp.int32)
    layer = from_linen("embed", nn.Embed(5, 4), example=(tokens,), reads=("tokens",))
    params = layer.init(jax.random.key(0))
    data = {"tokens": jnp.asarray([[1, 0, 4]], jnp.int32)}
    np.testing.assert_array_equal(layer.apply(params, None, LayerContext(data)), params["embedding"][data["tokens"]])


def test_linen_passes_pytrees_and_what_is_no_array() -> None:
    class Repeat(nn.Module):
        @nn.compact
        def __call__(self, x: dict[str, Any]) -> dict[str, Any]:
            h = x["h"]
            for _ in range(x["times"]):
                h = nn.Dense(8)(h)
            return {"h": h, "times": x["times"], "tag": x["tag"]}

    layer = from_linen("repeat", Repeat(), example=({"h": SHAPE, "times": 2, "tag": "a"},))
    params = layer.init(jax.random.key(0))
    assert set(params) == {"Dense_0", "Dense_1"}
    y = layer.apply(params, {"h": X, "times": 2, "tag": "a"}, EVAL)
    assert y["times"] == 2 and y["tag"] == "a" and y["h"].shape == (4, 8)


def test_tied_leaves_are_left_out_of_init() -> None:
    layer = from_linen("mlp", LinenMLP(), example=(SHAPE,), tied={("Dense_1", "kernel"): ("first", ("w",))})
    params = layer.init(jax.random.key(1))
    assert set(params["Dense_1"]) == {"bias"} and set(params["Dense_0"]) == {"kernel", "bias"}
    both = {("Dense_1", "kernel"): ("first", ("w",)), ("Dense_1", "bias"): ("first", ("b",))}
    assert set(from_linen("mlp", LinenMLP(), example=(SHAPE,), tied=both).init(jax.random.key(1))) == {"Dense_0"}
    wrong = from_linen("mlp", LinenMLP(), example=(SHAPE,), tied={("Dense_2", "kernel"): ("first", ("w",))})
    with pytest.raises(StageError, match=r"Dense_2/kernel.*Dense_0, Dense_1"):
        wrong.init(jax.random.key(1))


def test_layers_replaced_by_name_share_their_functions() -> None:
    first = from_linen("block_00", LinenMLP(), example=(SHAPE,), kind="mlp")
    second = dataclasses.replace(first, name="block_01")
    assert second.init is first.init and second.apply is first.apply and second.kind == "mlp"


def test_linen_state_and_misuse_are_refused() -> None:
    class Normed(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            return nn.BatchNorm(use_running_average=not train)(x)

    with pytest.raises(StageError, match=r"\(batch_stats\).*use"):
        from_linen("norm", Normed(), example=(SHAPE,)).init(jax.random.key(0))
    careless = from_linen("mlp", LinenMLP(0.5), example=(SHAPE,))
    params = careless.init(jax.random.key(0))
    with pytest.raises(StageError, match="uses_key=True"):
        careless.apply(params, X, TRAIN)
    with pytest.raises(StageError, match=r"linen module LinenMLP: .*kernel") as error:
        careless.apply({"Dense_0": {}}, X, EVAL)
    assert "\n" not in str(error.value)


# --- nnx --------------------------------------------------------------------------------------------------------------


def test_nnx_gives_what_flax_gives() -> None:
    layer = from_nnx("mlp", NnxMLP)
    params = layer.init(jax.random.key(1))
    module = NnxMLP(nnx.Rngs(jax.random.key(1)))
    assert is_plain(params) and set(params) == {"layers", "out"} and set(params["layers"]) == {"0", "1"}
    np.testing.assert_allclose(params["layers"]["1"]["kernel"], module.layers[1].kernel[...], rtol=1e-6, atol=1e-7)
    nnx.update(module, nnx.State(jax.tree.map(nnx.Param, with_int_keys(params))))
    module.eval()
    np.testing.assert_allclose(layer.apply(params, X, EVAL), module(X), rtol=1e-6)
    grads = jax.jit(jax.grad(lambda p: layer.apply(p, X, EVAL).sum()))(params)
    theirs = nnx.to_pure_dict(nnx.grad(lambda m: m(X).sum())(module))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), with_int_keys(grads), theirs)


def with_int_keys(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    return {int(key) if key.isdigit() else key: with_int_keys(value) for key, value in tree.items()}


def test_nnx_dropout_draws_from_the_context_key() -> None:
    layer = from_nnx("mlp", lambda rngs: NnxMLP(rngs, 0.5))
    assert layer.uses_key
    params = layer.init(jax.random.key(1))
    apply = jax.jit(lambda key, train: layer.apply(params, X, LayerContext({}, key, train)), static_argnums=1)
    first, repeat, other = (
        apply(jax.random.key(5), True),
        apply(jax.random.key(5), True),
        apply(jax.random.key(6), True),
    )
    assert jnp.array_equal(first, repeat) and not jnp.array_equal(first, other)
    still = layer.apply(params, X, EVAL)
    np.testing.assert_allclose(still, from_nnx("mlp", NnxMLP).apply(params, X, EVAL), rtol=1e-6)
    hidden = nnx.relu(X @ params["layers"]["0"]["kernel"]) @ params["layers"]["1"]["kernel"]  # biases start at zero
    scale = jnp.linalg.lstsq(params["out"]["kernel"].T, first.T)[0].T / nnx.relu(hidden)
    near = jnp.minimum(jnp.abs(scale), jnp.abs(scale - 2.0))[nnx.relu(hidden) > 0.1]
    assert float(near.max()) < 1e-2  # every activation is dropped, or kept and doubled
    with pytest.raises(StageError, match="NnxMLP holds random streams and got no key"):
        layer.apply(params, X, LayerContext({}))


def test_two_streams_of_one_module_differ() -> None:
    class Twice(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.a, self.b = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return self.a(x), self.b(x)

    a, b = from_nnx("twice", Twice).apply({}, jnp.ones((4, 64)), TRAIN)
    assert not jnp.array_equal(a, b)


def test_nnx_state_and_misuse_are_refused() -> None:
    class Assigns(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.w = nnx.Param(jnp.ones(()))

        def __call__(self, x: jax.Array) -> jax.Array:
            self.w[...] = self.w[...] * 2
            return x

    norm = from_nnx("norm", lambda rngs: nnx.BatchNorm(8, rngs=rngs))
    params = norm.init(jax.random.key(0))
    with pytest.raises(
        StageError,
        match=r"'norm'.*\(BatchStat\)",
    ):
        norm.apply(params, X, TRAIN)
    np.testing.assert_allclose(norm.apply(params, X, EVAL), X, rtol=1e-5)  # reads its statistics only
    layer = from_nnx("assigns", Assigns)
    with pytest.raises(StageError, match="'assigns'"):
        layer.apply(layer.init(jax.random.key(0)), X, EVAL)
    with pytest.raises(StageError, match="layers/0/"):
        from_nnx("mlp", NnxMLP).apply({}, X, EVAL)


def adds(m: Any) -> None:
    m.count[...] += 1


def grows(m: Any) -> None:
    m.count[...] = jnp.maximum(m.count[...], 5.0)


def counts(m: Any) -> None:
    m.step += 1


def appends(m: Any) -> None:
    m.seen.append(1)


def notes(m: Any) -> None:
    m.notes["a"][0] = 3


def replaces_array(m: Any) -> None:
    m.table = m.table + 1


def writes_into_array(m: Any) -> None:
    m.table[0] = 7.0


def keeps_array(m: Any) -> None:
    m.last = jnp.ones(3)


def puts_another_sort(m: Any) -> None:
    m.shapes.set_value(jnp.ones(2))


def writes_into_a_variables_dict(m: Any) -> None:
    m.shapes["a"] = 3


def removes(m: Any) -> None:
    del m.count


def swaps_activation(m: Any) -> None:
    m.act = nnx.relu


class Changes(nnx.Module):
    """State of every sort, of which a call changes some; what it returns would differ from trace to trace."""

    def __init__(self, rngs: nnx.Rngs, change: Any, jitted: bool = False) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(()))
        self.count = nnx.Variable(jnp.zeros(()))
        self.shapes = nnx.Variable({"a": 1})
        self.table = np.zeros(3, np.float32)
        self.change, self.step, self.act, self.nothing = change, 0, nnx.tanh, None
        self.seen: list[int] = []
        self.notes: dict[str, list[int]] = {"a": [0]}
        self.jitted = jitted

    def __call__(self, x: jax.Array) -> jax.Array:
        change = nnx.jit(lambda m: m.change(m)) if self.jitted else self.change
        change(self)
        count = 0 if not hasattr(self, "count") else self.count[...]
        return self.scale[...] * self.act(self.linear(x)) + count + len(self.seen) + self.table[0] + self.step


@pytest.mark.parametrize("form", ["function", "instance", "jitted"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (adds, r"changes its state count \(Variable\) in a call"),
        (grows, r"changes its state count \(Variable\) in a call"),
        (replaces_array, r"changes its state table \(array\) in a call"),
        (writes_into_array, r"changes its state table \(array\) in a call"),
        (puts_another_sort, r"changes its state shapes \(Variable\) in a call"),
        (writes_into_a_variables_dict, r"changes its state shapes \(Variable\) in a call"),
        (counts, "changes its attribute step in a call"),
        (appends, "changes its attribute seen in a call"),
        (notes, "changes its attribute notes in a call"),
        (keeps_array, "changes its attribute last in a call"),
        (removes, "changes its attribute count in a call"),
        (swaps_activation, "changes its attribute act in a call"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_a_call_changes_is_refused_each_time(change: Any, message: str, form: str) -> None:
    """And nothing of it is there in the next trace, nor in the module that was given."""
    if form == "jitted" and change in (writes_into_array, keeps_array):
        pytest.skip("nnx.jit itself refuses it")
    module = Changes(nnx.Rngs(0), change)
    source = module if form == "instance" else lambda rngs: Changes(rngs, change, jitted=form == "jitted")
    layer = from_nnx("counter", source)
    params = layer.init(jax.random.key(0))
    for context in (EVAL, TRAIN, EVAL):
        with pytest.raises(StageError, match=f"^layer 'counter': nnx module Changes {message}") as error:
            jax.jit(lambda p, x, context=context: layer.apply(p, x, context))(params, X)
        assert "\n" not in str(error.value)
    assert module.seen == [] and module.notes == {"a": [0]} and float(module.table[0]) == module.count[...] == 0.0


@pytest.mark.parametrize("jitted", [False, True])
def test_a_call_that_assigns_what_was_there_is_no_change(jitted: bool) -> None:
    def same(m: Any) -> None:
        m.step, m.seen, m.notes, m.act = 0, [], {"a": [0]}, m.act

    layer = from_nnx("same", lambda rngs: Changes(rngs, same, jitted))
    params = layer.init(jax.random.key(0))
    assert isinstance(params["scale"], jax.Array)
    expected = nnx.tanh(X @ params["linear"]["kernel"] + params["linear"]["bias"][None])
    np.testing.assert_allclose(layer.apply(params, X, EVAL), expected, rtol=1e-5, atol=1e-6)


def test_parameters_of_numpy_are_not_written_into() -> None:
    def scales(m: Any) -> None:
        m.scale[...] *= 2

    layer = from_nnx("scales", lambda rngs: Changes(rngs, scales))
    params = jax.tree.map(np.array, layer.init(jax.random.key(0)))
    with pytest.raises(StageError, match="'scales'"):
        layer.apply(params, X, EVAL)
    assert params["scale"] == 1.0


def test_intermediates_that_a_call_sows_are_dropped() -> None:
    class Sows(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            y = self.linear(x)
            self.seen = nnx.Intermediate(y)
            return y

    layer = from_nnx("sows", Sows)
    params = layer.init(jax.random.key(0))
    expected = X @ params["linear"]["kernel"] + params["linear"]["bias"][None]
    np.testing.assert_allclose(jax.jit(lambda p: layer.apply(p, X, EVAL))(params), expected, rtol=1e-5, atol=1e-6)


class Tables(nnx.Module):
    """Everything that a module may hold and only read."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.again = self.linear
        self.jax_table = jnp.linspace(0.0, 1.0, 8)
        self.numpy_table = np.linspace(1.0, 2.0, 8, dtype=np.float32)
        self.variable = nnx.Variable(jnp.full((8,), 2.0))
        self.listed = nnx.List([jnp.arange(8.0)])
        self.pair = nnx.data((jnp.ones(8), "name"))

    def __call__(self, x: jax.Array) -> jax.Array:
        table = self.jax_table * self.numpy_table * self.variable[...] + self.listed[0] + self.pair[0]
        return self.again(self.linear(x)) * table[None]


class Nnx:
    """Modules that use nnx's transformations in their call."""

    class Jitted(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.mlp = NnxMLP(rngs, 0.5)

        @nnx.jit
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.mlp(x)

    class Remat(Jitted):
        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.remat(lambda m, x: m(x))(self.mlp, x)  # type: ignore[no-any-return]

    class Scanned(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.table = jnp.linspace(0.0, 1.0, 8)

            @nnx.split_rngs(splits=3)
            @nnx.vmap(in_axes=(0,), out_axes=0)
            def stack(rngs: nnx.Rngs) -> NnxMLP:
                return NnxMLP(rngs, 0.5)

            self.layers = stack(rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            @nnx.remat
            def run(x: jax.Array, layer: NnxMLP) -> jax.Array:
                return x + layer(x)

            return run(x, self.layers) * self.table[None]  # type: ignore[no-any-return]


@pytest.mark.parametrize("instance", [False, True])
def test_nnx_constants_are_baked_in(instance: bool) -> None:
    module = Tables(nnx.Rngs(jax.random.key(1)))
    layer = from_nnx("tables", module if instance else Tables)
    params = layer.init(jax.random.key(1))
    assert set(params) == {"again"} and set(params["again"]) == {"bias", "kernel"}  # one leaf, though it is used twice
    np.testing.assert_allclose(layer.apply(params, X, TRAIN), module(X), rtol=1e-6)
    closed = jax.make_jaxpr(lambda p, x: layer.apply(p, x, TRAIN))(params, X)
    assert {c.tobytes() for c in map(np.asarray, closed.consts)} >= {np.asarray(module.jax_table).tobytes()}


def test_an_nnx_module_in_place_of_a_function_gives_its_weights() -> None:
    module = NnxMLP(nnx.Rngs(3))
    layer = from_nnx("mlp", module)
    params = layer.init(jax.random.key(99))
    np.testing.assert_array_equal(params["layers"]["1"]["kernel"], module.layers[1].kernel[...])
    grads = jax.grad(lambda p: layer.apply(p, X, EVAL).sum())(params)
    theirs = nnx.to_pure_dict(nnx.grad(lambda m: m(X).sum())(module))
    jax.tree.map(np.testing.assert_array_equal, with_int_keys(grads), theirs)
    assert module.dropout.deterministic is False


@pytest.mark.parametrize("module", [Nnx.Jitted, Nnx.Remat, Nnx.Scanned], ids=lambda m: m.__name__)
def test_nnx_transformations_hand_state_back_unchanged(module: Any) -> None:
    layer = from_nnx("layer", module)
    params = layer.init(jax.random.key(1))
    run = jax.jit(lambda p, key: layer.apply(p, X, LayerContext({}, key)))
    first, repeat, other = run(params, TRAIN.key), run(params, TRAIN.key), run(params, jax.random.key(6))
    assert jnp.array_equal(first, repeat) and not jnp.array_equal(first, other)
    nnx_module = module(nnx.Rngs(0))
    nnx.update(nnx_module, nnx.State(jax.tree.map(nnx.Param, with_int_keys(params))))
    nnx_module.eval()
    np.testing.assert_allclose(jax.jit(lambda p: layer.apply(p, X, EVAL))(params), nnx_module(X), rtol=1e-5, atol=1e-6)


def test_nnx_scan_that_changes_its_layers_is_refused() -> None:
    class Counting(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.count = nnx.Variable(jnp.zeros((3,)))

        def __call__(self, x: jax.Array) -> jax.Array:
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x: jax.Array, count: nnx.Variable) -> jax.Array:  # type: ignore[type-arg]
                count[...] += 1
                return x

            return run(x, self.count)  # type: ignore[no-any-return]

    layer = from_nnx("counting", Counting)
    with pytest.raises(StageError, match=r"'counting'.*\(Variable\)"):
        layer.apply({}, X, TRAIN)


def test_weight_norm_computes_with_normalised_weights() -> None:
    class Normed(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.WeightNorm(nnx.Linear(8, 4, rngs=rngs), rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.linear(x)  # type: ignore[no-any-return]

    layer = from_nnx("normed", Normed)
    params = layer.init(jax.random.key(1))
    kernel = params["linear"]["layer_instance"]["kernel"]
    expected = X @ (kernel / jnp.linalg.norm(kernel, axis=0, keepdims=True))
    np.testing.assert_allclose(layer.apply(params, X, TRAIN), expected, rtol=1e-5)


def test_nnx_params_of_any_subclass_are_trained_and_random_constants_refused() -> None:
    class Mine(nnx.Param):  # type: ignore[type-arg]
        pass

    class Module(nnx.Module):
        def __init__(self, rngs: nnx.Rngs, frozen: bool = False) -> None:
            self.w = Mine(jnp.ones((8, 8)))
            self.lora = nnx.LoRA(8, 2, 8, rngs=rngs)
            if frozen:
                self.features = jax.random.normal(rngs.params(), (8, 8))

        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ self.w[...] + self.lora(x)

    assert set(from_nnx("m", Module).init(jax.random.key(0))) == {"w", "lora"}
    with pytest.raises(StageError, match="layer 'm': nnx module Module draws its constant features at random"):
        from_nnx("m", lambda rngs: Module(rngs, frozen=True))
    from_nnx("m", Module(nnx.Rngs(0), frozen=True))  # its values are there


def test_what_builds_no_nnx_module_is_refused() -> None:
    with pytest.raises(StageError, match="layer 'm': its function returns ndarray; want an nnx module"):
        from_nnx("m", lambda rngs: np.ones(3))
    with pytest.raises(StageError, match=r"'m'.*nnx.Rngs"):
        from_nnx("m", 3)
    with pytest.raises(StageError, match=r"'m'.*from_linen"):
        from_nnx("m", LinenMLP())
    with pytest.raises(StageError, match=r"'m'.*from_linen"):
        from_linen("m", LinenMLP, example=(SHAPE,))


def test_an_nnx_module_in_a_compiled_step_traces_once() -> None:
    traces = []

    class Counts(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            traces.append(1)
            return self.linear(x)

    layer = from_nnx("counts", Counts)
    params = layer.init(jax.random.key(0))
    step = jax.jit(lambda p, x: layer.apply(p, x, EVAL))
    step(params, X)
    step(params, X + 1)
    assert len(traces) == 1
