"""Tiny layers of every kind that stages must handle, and a plain driver of stage functions for one or more microbatches.

The driver knows ports and nothing else: what it computes is the sequential reference for schedules, and is itself compared with
``jax.value_and_grad`` of the uncut layers. Legend: B batch, T time, D width, H heads, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from jaxpipe.axes import DP
from jaxpipe.stage.functions import Port, StageFunctions
from jaxpipe.stage.model.layer import Layer, LayerContext, Params
from jaxpipe.stage.model.params import stage_params
from jaxpipe.stage.split.trace import layer_key
from tests.support.interpret import interpret

V, D, H, T, B = 11, 8, 2, 6, 4


def normal(key: jax.Array, *shape: int, scale: float = 0.3) -> jax.Array:
    return scale * jax.random.normal(key, shape)


def embedding(name: str = "embed") -> Layer:
    return Layer(
        name, lambda k: {"table": normal(k, V, D)}, lambda p, x, c: p["table"][c.data["tokens"]], reads=("tokens",)
    )


def _row(v: jax.Array) -> jax.Array:
    return v[None, None, :]


def norm(p: Params, x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * _row(p["scale"]) + _row(p["bias"])


def _norm_params(key: jax.Array) -> Params:
    a, b = jax.random.split(key)
    return {"scale": 1 + normal(a, D), "bias": normal(b, D)}


def mlp(name: str, hidden: int = 4 * D) -> Layer:
    def init(key: jax.Array) -> Params:
        a, b, c = jax.random.split(key, 3)
        return {
            "norm": _norm_params(c),
            "up": normal(a, D, hidden),
            "up_bias": jnp.zeros((hidden,)),
            "down": normal(b, hidden, D),
        }

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        return x + jax.nn.gelu(norm(p["norm"], x) @ p["up"] + _row(p["up_bias"])) @ p["down"]

    return Layer(name, init, apply, kind=f"mlp{hidden}")


def attention(name: str) -> Layer:
    def init(key: jax.Array) -> Params:
        q, k, v, o = jax.random.split(key, 4)
        return {"norm": _norm_params(key), **{n: normal(s, D, D) for n, s in zip("qkvo", (q, k, v, o), strict=True)}}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        h = norm(p["norm"], x)
        b, t, _ = h.shape
        q, k, v = ((h @ p[n]).reshape(b, t, H, D // H) for n in "qkv")
        scores = checkpoint_name(jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D // H), "attn_scores")
        mask = jnp.tril(jnp.ones((t, t), bool))[None, None]
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        return x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(b, t, D) @ p["o"]

    return Layer(name, init, apply, kind="attention")


def dropout_mlp(name: str) -> Layer:
    def init(key: jax.Array) -> Params:
        return {"w": normal(key, D, D)}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        h = jnp.tanh(x @ p["w"])
        if c.key is not None:
            h = jnp.where(jax.random.bernoulli(c.key, 0.8, h.shape), h / 0.8, 0.0)
        return x + h

    return Layer(name, init, apply, uses_key=True, kind="dropout")


def scanned(name: str, depth: int = 3) -> Layer:
    """A scan over stacked parameters: their slices must not become residuals."""

    def init(key: jax.Array) -> Params:
        a, b = jax.random.split(key)
        return {"w": normal(a, depth, D, D), "shared": normal(b, D, D)}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        def body(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            return h + jnp.tanh(h @ (w * 2.0) @ p["shared"]), None

        return jax.lax.scan(body, x, p["w"])[0]

    return Layer(name, init, apply, kind="scanned")


def nested_loops(name: str, depth: int = 2) -> Layer:
    """A reversed scan that counts, over a scan with weights of its own: the inner loop mixes dx and weight gradients."""

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        def inner(h: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.sin(h @ w) + h, h.sum()

        def outer(carry: tuple[jax.Array, jax.Array], w: jax.Array) -> tuple[Any, jax.Array]:
            h, count = carry
            h, sums = jax.lax.scan(inner, h * p["gain"], jnp.stack([w, w * w]))
            return (h, count + 1), sums * count

        (h, _), sums = jax.lax.scan(outer, (x, jnp.int32(0)), p["w"], reverse=True, unroll=2)
        return h + sums.sum() * 0.01

    return Layer(name, lambda k: {"w": normal(k, depth, D, D), "gain": jnp.float32(0.5)}, apply, kind="nested")


def branched(name: str) -> Layer:
    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        return jax.lax.cond(c.data["tokens"].sum() > 0, lambda x: jnp.tanh(x @ p["w"]), lambda x: x, x)

    return Layer(name, lambda k: {"w": normal(k, D, D)}, apply, reads=("tokens",), kind="branched")


def checkpointed(name: str) -> Layer:
    inner = mlp(name)

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        return jax.checkpoint(lambda p, x: inner.apply(p, x, c))(p, x)

    return Layer(name, inner.init, apply, kind="checkpointed")


def with_carry(name: str = "carry") -> Layer:
    """Return a layer that starts a carry of an integer array, a float array without parameters, and static leaves."""

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        return {
            "h": x,
            "ids": c.data["tokens"] % 3,
            "pos": jnp.cos(c.data["tokens"] * 0.1).astype(x.dtype),
            "n": 2,
            "s": "relu",
        }

    return Layer(name, lambda k: {}, apply, reads=("tokens",))


def carry_step(name: str) -> Layer:
    def init(key: jax.Array) -> Params:
        return {"table": normal(key, 3, D)}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        assert isinstance(x["n"], int)
        assert x["s"] == "relu"
        h = x["h"] + p["table"][x["ids"]] * x["pos"][..., None] * x["n"]
        return {**x, "h": h, "n": x["n"] + 1}

    return Layer(name, init, apply, kind="carry_step")


def end_carry(name: str = "end") -> Layer:
    return Layer(name, lambda k: {}, lambda p, x, c: x["h"] * x["n"])


def head(name: str = "head", tied_to: str | None = None) -> Layer:
    def init(key: jax.Array) -> Params:
        return {"norm": _norm_params(key), **({} if tied_to else {"out": normal(key, D, V)})}

    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        h = norm(p["norm"], x)
        return h @ (p["table"].T if tied_to else p["out"])

    tied = {("table",): (tied_to, ("table",))} if tied_to else {}
    return Layer(name, init, apply, tied=tied)


def loss(name: str = "loss") -> Layer:
    def apply(p: Params, x: Any, c: LayerContext) -> Any:
        labels = c.data["labels"]
        weights = (labels > 0).astype(x.dtype)
        log_p = jax.nn.log_softmax(x)
        picked = jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]
        return -(picked * weights).sum(), weights.sum()

    return Layer(name, lambda k: {}, apply, reads=("labels",))


def init_params(layers: Sequence[Layer], dtype: Any = None) -> dict[str, Params]:
    params = {layer.name: layer.init(jax.random.key(i)) for i, layer in enumerate(layers)}
    return jax.tree.map(
        lambda a: np.asarray(a, dtype), params
    )  # of NumPy: they are cut and joined, and nothing compiled


def batch_avals(batch: int = B) -> dict[str, jax.ShapeDtypeStruct]:
    return {n: jax.ShapeDtypeStruct((batch, T), jnp.int32) for n in ("tokens", "labels", "unread")}


def make_batch(seed: int = 0, batch: int = B) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.integers(0, V, (batch, T)).astype(np.int32) for n in ("tokens", "labels", "unread")}


KEY = np.array([3, 17], np.uint32)


def reference(
    layers: Sequence[Layer], params: Mapping[str, Params], batch: Mapping[str, Any], key: Any = KEY, train: bool = True
) -> tuple[jax.Array, jax.Array]:
    """Return (loss_sum, weight_sum) of the uncut layers."""
    x: Any = None
    for i, layer in enumerate(layers):
        layer_params = {
            **params[layer.name],
            **{path[-1]: params[owner][at[-1]] for path, (owner, at) in layer.tied.items()},
        }
        context = LayerContext(
            {n: jnp.asarray(batch[n]) for n in layer.reads},
            layer_key(key, i) if layer.uses_key and train else None,
            train,
        )
        x = layer.apply(layer_params, x, context)
    return x


def loss_and_grads(
    layers: Sequence[Layer], params: Any, batch: Mapping[str, Any]
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Return ``((loss_sum, weight_sum), gradients)`` of the uncut layers by ``jax.value_and_grad``, compiled as one program."""
    program = jax.jit(jax.value_and_grad(lambda p, b: reference(layers, p, b), has_aux=True))
    return program(params, dict(batch))  # type: ignore[no-any-return]


class Runner:
    """Runs the functions of a chain of stages, microbatch by microbatch, and accumulates gradients.

    ``compiled=False`` interprets the jaxprs of stages of one device each, with NumPy, instead of calling the compiled
    functions: seconds faster for one-off checks. Arrays of no mesh: JAX would move the arguments of every equation to the
    mesh that it names.
    """

    def __init__(
        self,
        functions: Sequence[StageFunctions],
        stages: Sequence[Sequence[Layer]],
        params: Mapping[str, Params],
        compiled: bool = True,
    ) -> None:
        self.functions = functions
        self.compiled = compiled
        self.params = [
            [
                jax.device_put(b, a.sharding)
                for b, a in zip(f.layout.pack(stage_params(s, params)), f.param_avals, strict=True)
            ]
            for f, s in zip(functions, stages, strict=True)
        ]
        self.acc = [[jax.device_put(np.zeros(a.shape, a.dtype), a.sharding) for a in f.acc_avals] for f in functions]
        self.values: list[dict[Port, jax.Array]] = []

    def microbatch(
        self, batch: Mapping[str, Any], key: Any = KEY, fused: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        self.values = [{} for _ in self.functions]
        count = len(self.functions)
        for s in range(count):
            self.call(s, "F", batch, key)
        for s in reversed(range(count)):
            for op in ("BW",) if fused else ("B", "W"):
                self.call(s, op, batch, key)
        loss, weight = (np.asarray(self.values[-1][Port("loss", i)]).sum() for i in (0, 1))
        return loss, weight

    def evaluate(self, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
        self.values = [{} for _ in self.functions]
        for s in range(len(self.functions)):
            self.call(s, "E", batch, None)
        return self.values[-1][Port("loss", 0)], self.values[-1][Port("loss", 1)]

    def call(self, s: int, op: str, batch: Mapping[str, Any], key: Any) -> None:
        stage = self.functions[s]
        values = self.values[s]
        function = stage.evaluation if op == "E" else stage.functions[op]
        args = []
        for port, aval in zip(function.inputs, function.avals_in, strict=True):
            match port.kind:
                case "param":
                    value = self.params[s][port.index]
                case "acc":
                    value = self.acc[s][port.index]
                case "data":
                    value = batch[stage.data_names[port.index]]
                case "key":
                    value = key
                case _:
                    value = values[port]
            args.append(jax.device_put(value, aval.sharding) if self.compiled else np.asarray(value))
            assert (args[-1].shape, args[-1].dtype) == (aval.shape, aval.dtype), f"stage {s} {op} {port}"
        if self.compiled:
            results = function.call(*args)
        else:
            results = tuple(map(np.asarray, interpret(function.jaxpr.jaxpr, function.jaxpr.consts, *args)))
        for port, value, aval in zip(function.outputs, results, function.avals_out, strict=True):
            assert (value.shape, value.dtype) == (aval.shape, aval.dtype), f"stage {s} {op} {port}"
            match port.kind:
                case "acc":
                    self.acc[s][port.index] = value
                case "y":
                    self.values[s + 1][Port("x", port.index)] = value
                case "dx":
                    self.values[s - 1][Port("dy", port.index)] = value
                case _:
                    values[port] = value

    def gradients(self) -> dict[str, Params]:
        """Return gradients by layer name; those of leaves tied across stages are added to their owners'."""
        grads: dict[str, Params] = {}
        for f, acc in zip(self.functions, self.acc, strict=True):
            dp = f.param_avals[0].sharding.mesh.shape[DP] if f.param_avals else 1
            grads.update(f.layout.unpack([np.asarray(a).reshape(dp, -1, *a.shape[1:]).sum(0) for a in acc]))
        for f in self.functions:
            for (layer, path), (owner, at) in f.layout.shared.items():
                grads[owner][at[-1]] = grads[owner][at[-1]] + grads[layer].pop(path[-1])
        return grads


def assert_trees_close(got: Any, expected: Any, rtol: float, atol: float) -> None:
    flat_got, flat_want = (dict(jax.tree_util.tree_flatten_with_path(t)[0]) for t in (got, expected))
    assert flat_got.keys() == flat_want.keys()
    for path, value in flat_want.items():
        np.testing.assert_allclose(flat_got[path], value, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
