"""Train a Flax model over two ranks, save it, and go on over one device with another schedule.

Run it from anywhere: ``python train_and_go_on.py [DIRECTORY]``. Without GPUs devices are emulated. What to change: the module,
the batches, ``Trainer``'s arguments. Ranks, chunks, schedule and cut say what runs where, never what is learnt.
"""

import sys

import numpy as np
import optax
from flax import linen as nn

from jaxpipe import Trainer, layers_from_linen

WIDTH, LENGTH, ROWS = 16, 8, 16
DIRECTORY = sys.argv[1] if len(sys.argv) > 1 else "runs/train_and_go_on"


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Sequential([Block() for _ in range(2)])(nn.Embed(64, WIDTH)(tokens))
        return nn.Dense(2)(x.mean(axis=1))


def loss(logits, batch):
    """Return a sum and the weight to divide it by; both are added up over the microbatches of a step."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.sum(), np.float32(losses.size)


def batch(step, rows=ROWS):
    """Return sequences of 64 kinds of tokens, and whether most of them are among the first 32."""
    tokens = np.random.default_rng(step).integers(0, 64, (rows, LENGTH), dtype=np.int32)
    return {"tokens": tokens, "label": ((tokens < 32).mean(axis=1) > 0.5).astype(np.int32)}


model = layers_from_linen(Classifier(), "Block", batch=batch(0, rows=4), reads=("tokens",), loss=loss)
trainer = Trainer(model, optimizer=optax.adamw(3e-3), schedule="zb-h1", ranks=2, microbatches=4, microbatch_size=4)
state = trainer.init()
while state.step < 20:
    state, metrics = trainer.step(state, batch(state.step))
trainer.save(state, DIRECTORY)
print(f"2 ranks, {trainer.schedule.name}: step {state.step}, loss {float(metrics.loss):.4f}")

# another pipeline: a checkpoint knows layers by name, and nothing of ranks
trainer = Trainer(model, optimizer=optax.adamw(3e-3), schedule="1f1b", ranks=1, microbatches=4, microbatch_size=4)
state = trainer.restore(DIRECTORY)
while state.step < 40:
    state, metrics = trainer.step(state, batch(state.step))
print(f"1 rank, {trainer.schedule.name}: step {state.step}, loss {float(metrics.loss):.4f}")
print(f"held out: {trainer.evaluate(state, batch(10**6))['loss']:.4f}")
