"""Folders of the Hugging Face hub: the models that they are, and the way there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxpipe.interop.folder import DTYPES
from jaxpipe.interop.hub import open_hub, weights_of
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.reference import logits, resolve_model
from jaxpipe.train.exported import export_hub
from jaxpipe.train.imported import import_hub
from jaxpipe.train.stored import stored_params
from tests.hub_folders import KINDS, TOKENS, V, tensors, write_folder

GOLDEN = json.loads((Path(__file__).parent / "golden" / "hub_logits.json").read_text())["logits"]
ROUND = ("float32", "bfloat16")
SHOWN = ((0, 0), (0, 11), (1, 23))


def read(folder: Path, **options: Any) -> tuple[Model, dict[str, Any]]:
    """The model in a folder, and its parameters."""
    hub = open_hub(folder)
    given = {"seq_len": 24, **hub.options, **options}
    model = resolve_model(hub.target, given)
    weights = weights_of(hub, given, stored_params(model))
    return model, {layer: weights.read(layer) for layer in weights.layers}


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """A padded vocabulary changes none."""
    model, params = read(write_folder(tmp_path / kind, kind, shards=2), vocab_multiple=4)
    ours = np.asarray(jax.jit(lambda p: logits(model, p, TOKENS))(params))
    assert ours.shape == (2, 24, 40) and (ours[:, :, V:] < -1e29).all()
    wanted = GOLDEN[kind]
    shown = [ours[row, t, :V:9] for row, t in SHOWN]
    np.testing.assert_allclose(shown, wanted["shown"], rtol=0, atol=1e-5 * wanted["largest"])
    np.testing.assert_allclose(np.abs(ours[:, :, :V]).max(), wanted["largest"], rtol=1e-5)


# --- there and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "shards"),
    [("gpt2", "float32", 1), ("qwen3-yarn", "bfloat16", 3)]
    + [pytest.param(kind, dtype, n, marks=pytest.mark.soak) for kind in KINDS for dtype in ROUND for n in (1, 3)],
)
def test_a_folder_comes_back_bit_for_bit(kind: str, dtype: str, shards: int, tmp_path: Path) -> None:
    given = write_folder(tmp_path / "given", kind, shards=shards, dtype=DTYPES[dtype])
    import_hub(given, tmp_path / "run", seq_len=24)
    size = np.dtype(DTYPES[dtype]).itemsize
    most = sum(array.size for array in tensors(KINDS[kind]).values()) * size // shards + 4096
    made = export_hub(tmp_path / "run", tmp_path / "back", dtype=dtype, shard_bytes=most)
    assert len(made.files) == shards or shards > 1
    back: dict[str, Any] = {}
    for file in made.files:
        back |= load_file(file)
    assert back.keys() == tensors(KINDS[kind]).keys()
    for name, array in tensors(KINDS[kind]).items():
        assert back[name].dtype == DTYPES[dtype] and np.array_equal(back[name], array.astype(DTYPES[dtype])), name
    one, other = open_hub(given), open_hub(made.path)
    assert one.exchange.config({"seq_len": 24, **one.options}) == other.exchange.config(
        {"seq_len": 24, **other.options}
    )
    assert other.config["torch_dtype"] == dtype and "rope_parameters" not in other.config
