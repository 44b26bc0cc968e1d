"""Products that make weight gradients return what they are added to, where nothing but the sum reads them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe._jax_compat import JaxprEqn, Var, sub_jaxprs
from jaxpipe.axes import RankMesh
from jaxpipe.mesh import pipeline_submeshes
from jaxpipe.stage.compiled.compile import build_all
from jaxpipe.stage.functions import StageFunction, StageFunctions
from jaxpipe.stage.jaxprs import Dataflow
from jaxpipe.stage.model.layer import Layer, LayerContext, Model, Params
from jaxpipe.stage.model.params import ParamLayout
from jaxpipe.stage.split import trace
from models.clip import CLIP
from models.gpt import GPT
from models.llama import Llama
from tests.support import toy_stages as toy

_SIZES: dict[str, Any] = {"vocab_size": 64, "d_model": 64, "num_heads": 4, "seq_len": 16, "num_layers": 2}
MODELS: Mapping[str, Callable[[], Model]] = {
    "gpt": lambda: GPT(**_SIZES),
    "llama": lambda: Llama(**_SIZES, num_kv_heads=2),
    "llama, tied": lambda: Llama(**_SIZES, tied=True),
}


@pytest.fixture(autouse=True)
def _every_leaf_has_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real matrices are larger than those that share one."""
    monkeypatch.setattr(ParamLayout, "build", partial(ParamLayout.build, small_bytes=0))


def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "add_in_products", lambda eqns, recomputed, sums, held: (list(eqns), recomputed))


def built(
    stages: Sequence[Sequence[Layer]],
    params: Mapping[str, Params],
    data: Mapping[str, jax.ShapeDtypeStruct],
    recompute: str = "none",
    tp: int = 1,
) -> tuple[StageFunctions, ...]:
    meshes = pipeline_submeshes(1, RankMesh(tp=tp)) * len(stages)
    return build_all(stages, params, data, meshes, recompute, tp=RankMesh(tp=tp))


def rounded_sums(f: StageFunctions, op: str) -> list[JaxprEqn]:
    """Return the products whose rounded result is cast and added to an accumulator, perhaps reshaped and transposed before."""
    function = f.functions[op]
    flow = Dataflow(function.jaxpr.eqns)
    accumulators = {v for p, v in zip(function.inputs, function.jaxpr.jaxpr.invars, strict=True) if p.kind == "acc"}

    def is_added(i: int) -> bool:
        readers = [flow.eqns[k] for k in flow.outputs(i)]
        if len(readers) == 1 and readers[0].primitive.name == "add":
            return not accumulators.isdisjoint(readers[0].invars)
        moved = len(readers) == 1 and readers[0].primitive.name in ("convert_element_type", "reshape", "transpose")
        return moved and is_added(next(iter(flow.outputs(i))))

    rounded = [i for i, eqn in enumerate(flow.eqns) if is_product_of(eqn, jnp.bfloat16, jnp.bfloat16)]
    return [flow.eqns[i] for i in rounded if is_added(i)]


def shaped(atom: Any) -> Any:
    return atom.aval


def is_product_of(eqn: JaxprEqn, operands: Any, result: Any) -> bool:
    dtypes = [shaped(a).dtype for a in (*eqn.invars, *eqn.outvars)]
    return eqn.primitive.name == "dot_general" and dtypes == [operands, operands, result]


def widened(f: StageFunctions, op: str) -> list[JaxprEqn]:
    return [eqn for eqn in f.functions[op].jaxpr.eqns if is_product_of(eqn, jnp.bfloat16, jnp.float32)]


def avals_of(layers: Sequence[Layer], dtype: Any) -> dict[str, Any]:
    params = {layer.name: jax.eval_shape(layer.init, jax.random.key(0)) for layer in layers}
    avals: dict[str, Any] = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, dtype), params)
    return avals


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_no_weight_gradient_of_a_decoder_is_rounded_before_it_is_added(name: str, recompute: str) -> None:
    model = MODELS[name]()
    stages = [model.layers[:2], model.layers[2:]]
    for f in built(stages, avals_of(model.layers, jnp.bfloat16), model.batch_spec(2), recompute):
        assert [rounded_sums(f, op) for op in ("W", "BW")] == [[], []]
        products = [eqn for eqn in f.functions["W"].jaxpr.eqns if eqn.primitive.name == "dot_general"]
        assert len(widened(f, "W")) == len(widened(f, "BW")) == len(products) >= 4
        assert not widened(f, "F")
        assert not widened(f, "B")


def test_before_they_were_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count above counts something."""
    as_before(monkeypatch)
    model = MODELS["gpt"]()
    first, last = built([model.layers[:2], model.layers[2:]], avals_of(model.layers, jnp.bfloat16), model.batch_spec(2))
    assert [len(rounded_sums(f, op)) for f in (first, last) for op in ("W", "BW")] == [4, 4, 5, 5]


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_shards_add_in_their_products(name: str) -> None:
    model = MODELS[name]()
    stages = [model.layers[:2], model.layers[2:]]
    first, _ = built(stages, avals_of(model.layers, jnp.bfloat16), model.batch_spec(2), tp=2)
    assert not rounded_sums(first, "W")
    assert len(widened(first, "W")) == 4


def test_towers_add_in_their_products() -> None:
    model = CLIP()
    (f,) = built([model.layers], avals_of(model.layers, jnp.bfloat16), model.batch_spec(2))
    assert not rounded_sums(f, "BW")
    assert widened(f, "W")


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_float32_compute_is_what_it_was(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    case = [model.layers[:2], model.layers[2:]], avals_of(model.layers, jnp.float32), model.batch_spec(2)
    now = [str(f.functions[op].jaxpr) for f in built(*case) for op in ("F", "B", "W", "BW")]
    as_before(monkeypatch)
    assert now == [str(f.functions[op].jaxpr) for f in built(*case) for op in ("F", "B", "W", "BW")]


# Values.


def shared(name: str) -> Layer:
    """Return a layer with a leaf that is used by two products, as it is and transposed, and once by itself."""

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        return x + jnp.tanh(x @ p["w"]) @ p["w"].T + p["w"][:1][None]

    return Layer(name, lambda k: {"w": toy.normal(k, toy.D, toy.D)}, apply)


def experts(name: str, count: int = 3) -> Layer:
    """Return a layer that sends each token through all experts, by products with an axis of experts."""

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        up = jnp.tanh(jnp.einsum("btd,edf->ebtf", x, p["up"]))
        return x + jnp.einsum("ebtf,efd->btd", up, p["down"])

    def init(key: jax.Array) -> Params:
        return {"up": toy.normal(key, count, toy.D, 16), "down": toy.normal(key, count, 16, toy.D)}

    return Layer(name, init, apply)


def toy_stages(layer: Layer, *, tied: bool = False) -> list[list[Layer]]:
    """Return an embedding, the layer and a head as three stages; as one stage where the head is tied to the embedding."""
    ends = [toy.head(tied_to="embed" if tied else None), toy.loss()]
    return [[toy.embedding(), layer, *ends]] if tied else [[toy.embedding()], [layer], ends]


def in_float32(function: StageFunction, arrays: Sequence[Any]) -> list[Any]:
    """Return what ``function`` computes where only its arguments, and what it scatters, are rounded to 16 bits."""

    def wide(value: Any) -> Any:
        return value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value

    jaxpr = function.jaxpr.jaxpr
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, map(jnp.asarray, function.jaxpr.consts), strict=True))
    values |= {v: wide(jnp.asarray(a)) for v, a in zip(jaxpr.invars, arrays, strict=True)}
    for eqn in jaxpr.eqns:
        operands = [values[a] if isinstance(a, Var) else wide(jnp.asarray(a.val)) for a in eqn.invars]
        names = {n: jnp.float32 for n in ("new_dtype", "preferred_element_type") if eqn.params.get(n) == jnp.bfloat16}
        if "update_jaxpr" in eqn.params:
            operands = [x.astype(shaped(a).dtype) for x, a in zip(operands, eqn.invars, strict=True)]
        results = eqn.primitive.bind(*operands, **eqn.params | names)
        results = results if eqn.primitive.multiple_results else [results]
        values |= zip(eqn.outvars, map(wide, results), strict=True)
    return [values[a] if isinstance(a, Var) else a.val for a in jaxpr.outvars]


def decoder_stages(make: Callable[[], Model]) -> tuple[list[list[Layer]], Any]:
    model = make()
    return [list(model.layers[:2]), list(model.layers[2:])], model.batch_spec(2)


STAGES: Mapping[str, Callable[[], tuple[list[list[Layer]], Any]]] = {
    **{name: partial(decoder_stages, make) for name, make in MODELS.items()},
    "shared": lambda: (toy_stages(shared("a")), toy.batch_avals()),
    "experts": lambda: (toy_stages(experts("a")), toy.batch_avals()),
    "checkpoint": lambda: (toy_stages(toy.checkpointed("a")), toy.batch_avals()),
    "tied": lambda: (toy_stages(toy.mlp("a"), tied=True), toy.batch_avals()),
}


def errors_of_w(name: str) -> tuple[float, float]:
    """Return, of W of all stages on random values: how far its sums are from those in float32, and how large these are."""
    stages, data = STAGES[name]()
    rng = np.random.default_rng(0)
    error = size = 0.0
    for f in built(stages, avals_of([layer for stage in stages for layer in stage], jnp.bfloat16), data):
        w = f.functions["W"]
        arrays = [
            rng.standard_normal(a.shape).astype(a.dtype)
            if jnp.issubdtype(a.dtype, jnp.floating)
            else rng.integers(0, 8, a.shape).astype(a.dtype)
            for a in w.avals_in
        ]
        exact = in_float32(w, arrays)
        results = w.call(*map(jax.device_put, arrays, [a.sharding for a in w.avals_in]))
        for port, got, want in zip(w.outputs, results, exact, strict=True):
            if port.kind == "acc":
                error += float(((np.asarray(got) - np.asarray(want)) ** 2).sum())
                size += float((np.asarray(want) ** 2).sum())
    return error**0.5, size**0.5


@pytest.mark.parametrize("name", STAGES)
def test_gradients_are_nearer_to_those_in_float32(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    after, size = errors_of_w(name)
    as_before(monkeypatch)
    before, _ = errors_of_w(name)
    assert after < 0.9 * before < 0.01 * size


def distance(layer: Layer, seed: int, *, tied: bool = False, fused: bool = False) -> tuple[float, Any]:
    """Return the distance of two microbatches' gradients in bfloat16 from those in float32 of the same parameters, and them."""
    stages = toy_stages(layer, tied=tied)
    layers = [layer for stage in stages for layer in stage]
    narrow = {layer.name: layer.init(jax.random.key(seed + i)) for i, layer in enumerate(layers)}
    gradients = []
    for dtype in (jnp.bfloat16, np.float32):
        params = jax.tree.map(lambda a, dtype=dtype: np.asarray(a, jnp.bfloat16).astype(dtype), narrow)
        runner = toy.Runner(built(stages, params, toy.batch_avals()), stages, params)
        for k in (0, 1):
            runner.microbatch(toy.make_batch(seed + k), fused=fused)
        gradients.append(runner.gradients())
    squares = jax.tree.map(lambda a, b: ((a - b) ** 2).sum(), *gradients)
    return float(np.sqrt(sum(jax.tree.leaves(squares)))), gradients[0]


@pytest.mark.parametrize("tied", [False, True])
def test_those_of_a_whole_chain_are_no_further(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the roundings of F and B count too, which are the same."""
    after = sum(distance(toy.mlp("a"), seed, tied=tied)[0] for seed in (0, 10))
    as_before(monkeypatch)
    assert after <= sum(distance(toy.mlp("a"), seed, tied=tied)[0] for seed in (0, 10))


@pytest.mark.parametrize("layer", [shared("a"), experts("a")], ids=["shared", "experts"])
def test_fused_and_split_backwards_agree(layer: Layer) -> None:
    jax.tree.map(np.testing.assert_array_equal, distance(layer, 3)[1], distance(layer, 3, fused=True)[1])


# One by one.


def program(apply: Callable[[Params, Any], Any], **shapes: tuple[int, ...]) -> StageFunctions:
    """Return the functions of a stage in bfloat16 between two others, which calls ``apply`` on leaves of these shapes."""
    leaves = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    middle = Layer("middle", lambda key: leaves, lambda p, x, c: apply(p, x))
    layers = [[toy.embedding()], [middle], [toy.head(), toy.loss()]]
    params = avals_of([layer for stage in layers for layer in stage], jnp.bfloat16)
    return built(layers, params, toy.batch_avals())[1]


def names_in_w(f: StageFunctions) -> Counter[str]:
    return Counter(eqn.primitive.name for eqn in f.functions["W"].jaxpr.eqns)


def test_each_product_of_a_shared_leaf_is_added_by_itself() -> None:
    f = program(lambda p, x: jnp.tanh(x @ p["w"]) @ p["w"].T, w=(toy.D, toy.D))
    assert len(widened(f, "W")) == 2
    assert (names_in_w(f)["add"], names_in_w(f)["add_any"], names_in_w(f)["convert_element_type"]) == (2, 0, 0)


def test_the_rest_of_a_shared_gradient_is_cast_and_added() -> None:
    f = program(lambda p, x: x @ p["w"] + p["w"][:1][None], w=(toy.D, toy.D))
    assert len(widened(f, "W")) == 1
    assert (names_in_w(f)["add"], names_in_w(f)["add_any"]) == (2, 0)


def test_a_batch_of_products_returns_float32_too() -> None:
    f = program(lambda p, x: jnp.einsum("btd,tdf->btf", x, p["w"]), w=(toy.T, toy.D, toy.D))
    assert not rounded_sums(f, "W")
    assert widened(f, "W")


def test_a_product_with_two_readers_keeps_its_rounding() -> None:
    """The gradient of two leaves that are one operand is cut in two."""
    f = program(lambda p, x: x @ jnp.concatenate([p["a"], p["b"]], 1), a=(toy.D, 3), b=(toy.D, 5))
    assert not widened(f, "W")


def test_a_cast_in_the_layer_is_a_cast_all_the_same() -> None:
    """Flax keeps parameters in float32 and casts them at each call: the cast back stands above the sum."""
    middle = Layer(
        "middle",
        lambda key: {"w": jnp.zeros((toy.D, 2, 4))},
        lambda p, x, c: (
            jnp.einsum("btd,dhk->bthk", x.astype(jnp.bfloat16), p["w"].astype(jnp.bfloat16))
            .reshape(x.shape)
            .astype(x.dtype)
        ),
    )
    layers = [[toy.embedding()], [middle], [toy.head(), toy.loss()]]
    params = avals_of([layer for stage in layers for layer in stage], jnp.float32)
    f = built(layers, params, toy.batch_avals())[1]
    assert not rounded_sums(f, "W")
    assert len(widened(f, "W")) == 1


def test_what_a_loop_stacks_stays_half_as_wide() -> None:
    def loop(p: Params, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["w"])[0]

    bodies = [b for eqn in program(loop, w=(3, toy.D, toy.D)).functions["W"].jaxpr.eqns for b in sub_jaxprs(eqn)]
    products = [eqn for body in bodies for eqn in body.eqns if eqn.primitive.name == "dot_general"]
    assert products
    assert not [eqn for eqn in products if is_product_of(eqn, jnp.bfloat16, jnp.float32)]


# Biases.


def projected(read: Callable[[jax.Array], jax.Array]) -> StageFunctions:
    """Return the functions of a stage that reads a biased projection [B, T, 2, H, K] so."""
    size = toy.D // toy.H

    def apply(p: Params, x: Any) -> Any:
        return read(jnp.einsum("btd,dnhk->btnhk", x, p["w"]) + p["bias"][None, None]).reshape(x.shape)

    return program(apply, w=(toy.D, 2, toy.H, size), bias=(2, toy.H, size))


def biases(f: StageFunctions) -> list[tuple[int, ...]]:
    return [shaped(eqn.invars[1]).shape for eqn in f.functions["F"].jaxpr.eqns if eqn.primitive.name == "add"]


def gated(y: jax.Array) -> jax.Array:
    return y[:, :, 0] * jnp.tanh(y[:, :, 1])


def test_the_bias_of_a_fused_projection_is_added_as_a_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    f = projected(gated)
    assert biases(f) == [(1, 1, 2 * toy.D)]
    monkeypatch.setattr(trace, "add_vectors", lambda eqns, recomputed: (list(eqns), recomputed))
    before = projected(gated)
    assert biases(before) == [(1, 1, 2, toy.H, toy.D // toy.H)]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(a.shape).astype(a.dtype) for a in f.functions["F"].avals_in]
    results = [in_float32(g.functions["F"], arrays)[0] for g in (f, before)]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("read", [lambda y: 0.5 * y.sum(2), lambda y: (0.5 * y)[:, :, 0]], ids=["summed", "scaled"])
def test_a_bias_stays_as_it_is_where_more_than_slices_read_the_sum(read: Callable[[jax.Array], jax.Array]) -> None:
    """XLA's GPU backend would leave it out of a multiplication by a scalar (openxla/xla#46110)."""
    assert biases(projected(read)) == [(1, 1, 2, toy.H, toy.D // toy.H)]


@pytest.mark.parametrize(
    ("make", "widths"),
    [(GPT, {3 * 64}), (partial(Llama, num_kv_heads=2, qkv_bias=True, mlp_bias=True), {2 * 4 * 16, 2 * 192})],
)
def test_biases_of_decoders_are_vectors(make: Callable[..., Model], widths: set[int]) -> None:
    model = make(**_SIZES)
    first, _ = built([model.layers[:2], model.layers[2:]], avals_of(model.layers, jnp.bfloat16), model.batch_spec(2))
    shapes = [shape for shape in biases(first) if shape[:2] == (1, 1)]
    assert widths <= {shape[-1] for shape in shapes}
    assert {len(shape) for shape in shapes if math.prod(shape) in widths} == {3}


def barriers(f: StageFunctions) -> int:
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in f.functions["F"].jaxpr.eqns)


@pytest.mark.parametrize(
    ("read", "count"),
    [
        (lambda y: (y * 0.0884)[:, :, 0] + y[:, :, 1], 1),
        (lambda y: (jnp.moveaxis(y, 2, 0) / 11.3)[0], 1),
        (lambda y: (y.astype(jnp.float32).reshape(-1) * jnp.float32(3)).astype(y.dtype).reshape(y.shape)[:, :, 0], 1),
        (lambda y: jnp.tanh(y)[:, :, 0] * 0.0884, 0),
        (gated, 0),
    ],
    ids=["scaled", "transposed, divided", "cast", "scaled past another function", "gated"],
)
def test_a_scale_is_kept_from_a_biased_product(
    read: Callable[[jax.Array], jax.Array], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA's GPU backend scales the product and not its bias where nothing lies between (openxla/xla#46110)."""
    f = projected(read)
    assert barriers(f) == count
    monkeypatch.setattr(trace, "keep_biases_scaled", lambda eqns, recomputed: (list(eqns), recomputed))
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(a.shape).astype(a.dtype) for a in f.functions["F"].avals_in]
    results = [in_float32(g.functions["F"], arrays)[0] for g in (f, projected(read))]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("make", [GPT, partial(Llama, num_kv_heads=2, qkv_bias=True, mlp_bias=True)])
def test_decoders_of_ours_scale_no_biased_product(make: Callable[..., Model]) -> None:
    model = make(**_SIZES)
    first, _ = built([model.layers[:2], model.layers[2:]], avals_of(model.layers, jnp.bfloat16), model.batch_spec(2))
    assert barriers(first) == 0
