"""Evaluation and generation over several devices: the numbers of one."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.stage.model.reference import init_params
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.tokenizers import ByteTokenizer
from jaxpipe.train.evaluate import Trained, devices_for, generate, held_out_score, placement_over
from models.llama import Llama


def test_several_devices_give_the_numbers_of_one() -> None:
    """Tied leaves too: the head takes its kernel from the first layer."""
    model = Llama(vocab_size=256, d_model=16, num_layers=3, num_heads=2, mlp_size=16, seq_len=8, tied=True)
    params = init_params(model, 0)
    ids = np.random.default_rng(0).integers(0, 256, (3, 2, 9))
    batches = [{"tokens": x[:, :-1], "targets": x[:, 1:], "weights": np.ones((2, 8), np.float32)} for x in ids]
    scores = []
    for devices in (devices_for(model), devices_for(model, 3)):
        where = placement_over(model, devices)
        assert set(where.values()) == set(devices) and where.keys() == params.keys()
        placed = {name: jax.device_put(tree, where[name]) for name, tree in params.items()}
        trained = Trained(TrainConfig(), model, placed, ByteTokenizer(), 0, devices=devices)
        text = "".join(generate(trained, "the", 3, temperature=0))
        scores.append((held_out_score(trained, batches, 1.0).loss, text))
    assert scores[0][0] == pytest.approx(scores[1][0], rel=1e-6)
    assert scores[0][1] == scores[1][1]
    with pytest.raises(ConfigError, match="--devices 99: JAX sees"):
        devices_for(model, 99)
