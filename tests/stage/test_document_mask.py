"""Document masks: a step's gradients are those of the documents run one by one, through any pipeline."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpipe.axes import RankMesh
from jaxpipe.errors import ConfigError, DataError
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.schedule import generate
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.plan import plan_stages
from jaxpipe.stage.model.reference import apply_model, init_params
from jaxpipe.train.config import TrainConfig
from jaxpipe.train.corpora.corpus import Corpus
from jaxpipe.train.corpora.datasets import load_dataset
from jaxpipe.train.corpora.tokenizers import IdTokenizer
from jaxpipe.train.data import Batch, DataState, TokenDataset
from jaxpipe.train.setup import build_model, read_by
from models.gpt import GPT
from models.llama import Llama
from tests.support.parallel_cases import MICROBATCHES, ROWS, SEQ, VOCAB, Case, assert_close

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 16, "num_heads": 8, "seq_len": SEQ, "dtype": "float64",
}  # fmt: skip


@cache
def model_of(name: str, mask: str, layers: int = 2) -> Model:
    if name == "gpt":
        return GPT(**COMMON, num_layers=layers, mlp_ratio=2, mask=mask)
    return Llama(
        **COMMON,
        num_layers=layers,
        num_kv_heads=2,
        mlp_size=24,
        window=5 if name == "llama-window" else None,
        mask=mask,
    )


def documents(count: int, longest: int, seed: int = 0, *, numbered: bool = False) -> Corpus:
    """Documents of random lengths; ``numbered``: each id is its position."""
    rng = np.random.default_rng(seed)
    edges = np.cumsum([0, *rng.integers(1, longest + 1, count)])
    ids = np.arange(edges[-1]) if numbered else rng.integers(0, VOCAB, edges[-1])
    return Corpus("documents", ids.astype(np.uint16), edges, None, (), "f", None, 0)


def batch_of(rows: int) -> Batch:
    data = TokenDataset.split(documents(300, SEQ), IdTokenizer(VOCAB), 0.0, mask="document")
    return data.batches(0, rows, SEQ).batch_at(0)


def one_document_a_row(batch: Batch) -> Batch:
    """Return each run of tokens of one document in a row of its own, from position 0 on."""
    pieces: list[dict[str, Any]] = []
    for row in range(len(batch["tokens"])):
        for k in np.unique(batch["segments"][row]):
            in_document = batch["segments"][row] == k
            pieces.append({n: batch[n][row][in_document] for n in ("tokens", "targets", "weights")})
    return {n: np.stack([np.pad(piece[n], (0, SEQ - len(piece[n]))) for piece in pieces]) for n in pieces[0]}


@cache
def step_of(name: str, mask: str, layers: int) -> Any:
    def loss(params: Any, batch: Any) -> Any:
        total, weight = apply_model(model_of(name, mask, layers), params, batch, train=False)
        return total / weight

    return jax.jit(jax.value_and_grad(loss))


def parameters(model: Model) -> Any:
    return jax.tree.map(lambda a: np.asarray(a, "float64"), init_params(model, 0))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["gpt", *(pytest.param(n, marks=pytest.mark.soak) for n in ("llama", "llama-window"))])
def test_gradients_are_those_of_documents_run_one_by_one(name: str) -> None:
    batch, params = batch_of(4), parameters(model_of(name, "document", 1))
    masked, causal = (step_of(name, mask, 1) for mask in ("document", "causal"))
    assert len(np.unique(batch["segments"])) > 2
    pieces = one_document_a_row(batch)
    one = {**pieces, "segments": np.zeros_like(pieces["tokens"])}  # as when text is generated
    expected = causal(params, pieces)
    assert_close(masked(params, batch), expected, rtol=1e-9, atol=1e-13)
    assert_close(masked(params, one), expected, rtol=1e-9, atol=1e-13)


CASES = [
    Case("gpt", 2, 2, 2),
    *(
        pytest.param(case, marks=pytest.mark.soak)
        for case in (
            Case("llama", 2, 2, 2, "zb-h1", sequence=True),
            Case("gpt", 4, 2, 1, "zb-h2", sequence=True),
            Case("gpt", 2, 1, 4, "v-zb"),
            Case("llama", 1, 4, 2),
            Case("llama-window", 4, 1, 2, "interleaved-1f1b"),
        )
    ),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_any_pipeline_gives_them(case: Case) -> None:
    batch = batch_of(MICROBATCHES * ROWS)
    schedule = generate(case.family, case.pp, MICROBATCHES)
    layers = max(2, schedule.num_stages - 3)
    masked = model_of(case.name, "document", layers)
    params = parameters(masked)
    pipe = Pipeline.build(
        masked,
        schedule,
        microbatch_size=ROWS,
        boundaries=[(s.start, s.stop) for s in plan_stages(masked, schedule.num_stages).stages],
        compute_dtype=jnp.dtype("float64"),
        dp=case.dp,
        tp=RankMesh(tp=case.tp, sequence=case.sequence),
    )
    split = {k: a.reshape(MICROBATCHES, ROWS, *a.shape[1:]) for k, a in batch.items()}
    expected = step_of(case.name, "causal", layers)(params, one_document_a_row(batch))
    assert_close(pipe.loss_and_grads(pipe.place(params), split), expected, rtol=1e-9, atol=1e-12)


def test_windows_say_which_document_each_token_is_of() -> None:
    corpus = documents(40, 11, numbered=True)
    data = TokenDataset.split(corpus, IdTokenizer(1 << 16), 0.0, mask="document")
    rows = data.windows("train", SEQ)
    batch = rows.batch(np.arange(len(rows)))
    document = np.searchsorted(corpus.edges, batch["tokens"], side="right")
    has_target = batch["targets"] > 0
    same = batch["segments"][:, 1:] == batch["segments"][:, :-1]
    np.testing.assert_array_equal(same[has_target[:, 1:]], (document[:, 1:] == document[:, :-1])[has_target[:, 1:]])
    targets = batch["targets"][batch["weights"] > 0]
    assert sorted(targets) == sorted(set(range(len(corpus.ids))) - set(corpus.edges[:-1].tolist()))
    assert batch["segments"].dtype == np.int32 and not batch["segments"][:, 0].any()


def _check_epochs(seed: int) -> None:
    """Every token of every document counts exactly once an epoch, in whatever batches it is read and resumed."""
    rng = np.random.default_rng(seed)
    mask = "document" if seed % 2 else "causal"
    corpus = documents(int(rng.integers(5, 60)), int(rng.integers(1, 40)), seed, numbered=True)
    seq_len = int(rng.integers(1, 20))
    holdout = float(rng.choice([0, 0.1])) if len(corpus.ids) > 50 else 0.0
    data = TokenDataset.split(corpus, IdTokenizer(1 << 16), holdout, mask=mask)
    held_out_tokens = {t for start, stop in data.held_out for t in range(start, stop)}
    first = {start for start, _ in data.train} | (set(corpus.edges.tolist()) if mask == "document" else set())
    expected = Counter(set(range(len(corpus.ids))) - held_out_tokens - first)
    n, counts, state, step = len(data.windows("train", seq_len)), Counter[int](), None, 0
    epochs, position = 2, 0
    while position < epochs * n:
        pp, tp, dp, per = (int(rng.choice([1, 2, 4])) for _ in range(4))
        batch = min(dp * per * int(rng.integers(1, 4)), n)  # dp · rows · microbatches; pp and tp change nothing
        assert pp and tp
        batches = data.batches(seed, batch, seq_len, state)
        for _ in range(int(rng.integers(1, 6))):
            arrays = batches.batch_at(step)
            num_rows = min(batch, epochs * n - position)
            counts.update(arrays["targets"][:num_rows][arrays["weights"][:num_rows] > 0].tolist())
            position, step = position + batch, step + 1
            if position >= epochs * n:
                break
        state = DataState.from_dict(batches.state_at(step).to_dict())
    assert counts == Counter(dict.fromkeys(expected, epochs))


@pytest.mark.parametrize("seed", range(24))
def test_every_token_counts_once_an_epoch_in_any_batches(seed: int) -> None:
    _check_epochs(seed)


@pytest.mark.soak
def test_every_token_counts_once_an_epoch_in_any_batches_at_length() -> None:
    for seed in range(24, 224):
        _check_epochs(seed)


def test_a_config_asks_for_a_model_that_tells_documents_apart(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "{"word " * (k % 9)}"}}\n' for k in range(300)))
    config = TrainConfig().override([f"data.path={path}", "data.mask=document", "data.seq_len=16"])
    dataset, model = load_dataset(config), build_model(config, 256)
    read_by(model, dataset, config.data.seq_len)
    assert model.layers[1].reads == ("segments",)
    causal = config.override(["data.mask=causal"])
    with pytest.raises(DataError, match="the model reads 'segments'"):
        read_by(model, load_dataset(causal), causal.data.seq_len)
    with pytest.raises(DataError, match=r"data.mask=document.*'segments'"):
        read_by(build_model(causal, 256), dataset, config.data.seq_len)
    with pytest.raises(ConfigError, match="'cudnn'"):
        build_model(config.override(["model.options.attention=cudnn"]), 256)
    with pytest.raises(ConfigError, match="mask is 'full'; use causal or document"):
        Llama(mask="full")
