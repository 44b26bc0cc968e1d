"""Write a model as plain functions, without Flax: an ensemble of two branches of layers that a last layer joins.

A layer is a pair of pure functions over dicts of arrays: ``init(key)`` makes its parameters, ``apply(params, x, context)`` uses
them. ``reads`` names the arrays of the batch that a layer sees, ``takes`` the earlier layers whose results it gets (by
default the one before it). The last layer is the loss: it returns a sum and the weight to divide it by. What to change: the
layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxpipe import Layer, Model, Trainer

FEATURES, WIDTH = 8, 16


def init_dense(inputs, outputs):
    """Return an ``init`` of a matrix and a bias."""
    return lambda key: {"w": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "b": jnp.zeros(outputs)}


def first(params, x, context):
    return jnp.tanh(context.data["x"] @ params["w"] + params["b"])


def hidden(params, x, context):
    return x + jnp.tanh(x @ params["w"] + params["b"])


def mean_squared_error(params, xs, context):
    """Join both branches; ``xs`` are the results of the layers in ``takes``."""
    error = jnp.concatenate(xs, axis=-1) @ params["w"] + params["b"] - context.data["y"]
    return (error**2).sum(), jnp.float32(error.size)


def branch(name):
    return (
        Layer(f"{name}_in", init_dense(FEATURES, WIDTH), first, reads=("x",), takes=()),
        Layer(f"{name}_hidden", init_dense(WIDTH, WIDTH), hidden),
    )


def batch_spec(rows):
    return {
        "x": jax.ShapeDtypeStruct((rows, FEATURES), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows, 1), jnp.float32),
    }


def batch(step, rows=16):
    x = np.random.default_rng(step).normal(size=(rows, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(axis=1, keepdims=True))}


loss = Layer("loss", init_dense(2 * WIDTH, 1), mean_squared_error, reads=("y",), takes=("left_hidden", "right_hidden"))
model = Model("two branches", (*branch("left"), *branch("right"), loss), batch_spec, vocab_size=0, seq_len=1)
trainer = Trainer(model, optimizer=optax.adam(1e-2), schedule="1f1b", ranks=2, microbatches=4, microbatch_size=4)
state = trainer.init()
losses = []
while state.step < 60:
    state, metrics = trainer.step(state, batch(state.step))
    losses.append(float(metrics.loss))
print(trainer)
print(f"mean squared error {np.mean(losses[:5]):.3f} at first, {np.mean(losses[-5:]):.3f} at the end")
