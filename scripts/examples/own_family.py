"""Make a schedule family of your own, look at it, and train with it.

A family is a function from sizes to a :class:`~jaxpipe.schedule.Schedule`; ``@family`` gives it a name that ``Trainer``, every
verb (``jaxpipe compare --import own_family``) and ``pipeline.schedule`` of a config understand. This one is 1F1B that never
holds more than two microbatches on a rank. What to change: the rows. Each is the order in which one rank issues its actions.
"""

import numpy as np
import optax

from jaxpipe import Trainer
from jaxpipe.models.gpt import GPT
from jaxpipe.schedule import Action, CostProfile, Schedule, check_schedule, family, one_to_one, simulate
from jaxpipe.schedule.text import draw

MOST = 2


@family(
    "capped-1f1b", "1F1B with at most two microbatches on a rank", "an example", peak_activations=lambda p, m, v: MOST
)
def capped_1f1b(ranks: int, microbatches: int) -> Schedule:
    """Return rows of forwards up to the cap, then one backward and one forward in turn, then the last backwards."""
    rows = []
    for rank in range(ranks):
        warm_up = min(MOST, ranks - rank, microbatches)
        row = [Action("F", rank, k) for k in range(warm_up)]
        for k in range(microbatches):
            row.append(Action("BW", rank, k))
            if k + warm_up < microbatches:
                row.append(Action("F", rank, k + warm_up))
        rows.append(tuple(row))
    return Schedule("capped-1f1b", one_to_one(ranks), microbatches, tuple(rows))


def train() -> None:
    schedule = capped_1f1b(4, 6)
    check_schedule(schedule)  # every action once, each after what it waits for, no deadlock
    timeline = simulate(schedule, CostProfile.uniform(4, f=1, b=1, w=1))
    print(draw(timeline))
    print(f"makespan {timeline.makespan:g}, at most {max(timeline.peak_activations):g} activations")

    model = GPT(vocab_size=64, d_model=16, num_layers=2, num_heads=2, seq_len=8)
    options = {"ranks": 2, "microbatches": 4, "microbatch_size": 2}
    tokens = np.random.default_rng(0).integers(0, 64, (8, 9))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": np.ones((8, 8))}
    trainer = Trainer(model, optimizer=optax.adamw(1e-3), schedule="capped-1f1b", **options)
    _, metrics = trainer.step(trainer.init(), batch)
    _, expected = trainer.with_schedule("1f1b").step(trainer.init(), batch)
    print(f"loss {float(metrics.loss):.6f}, with 1f1b {float(expected.loss):.6f}")


if __name__ == "__main__":  # so that --import own_family registers the family and trains nothing
    train()
