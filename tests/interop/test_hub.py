"""Folders of the Hugging Face hub: the models that they are, and the way there and back."""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpipe.axes import RankMesh
from jaxpipe.cli import main
from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.interop.folder import DTYPES, Planned, write_byte_tokenizer, write_tensors
from jaxpipe.interop.hub import open_hub, weights_of
from jaxpipe.runtime.pipeline import Pipeline
from jaxpipe.runtime.processes import Processes
from jaxpipe.schedule import generate
from jaxpipe.stage.model.layer import Model
from jaxpipe.stage.model.plan import plan_stages
from jaxpipe.stage.model.reference import logits, resolve_model
from jaxpipe.train.checkpoint import load_params, read_manifest
from jaxpipe.train.checkpoints.which_model import stored_params
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.corpora.tokenizers import load_tokenizer
from jaxpipe.train.evaluate import generate as generate_text
from jaxpipe.train.evaluate import load_trained
from jaxpipe.train.import_export import completed, export_hub, import_hub, initial_params
from jaxpipe.train.loop import train
from jaxpipe.train.setup import build_model
from tests.runtime.test_processes import run_in_threads
from tests.support import hub_experts
from tests.support.hub_folders import EXPERTS, KINDS, TOKENS, V, tensors, write_folder
from tests.support.paths import GOLDEN
from tests.support.train_runs import config as settings
from tests.support.train_runs import write_text

pytestmark = pytest.mark.usefixtures("one_build")

WANTED = json.loads((GOLDEN / "hub_logits.json").read_text())["logits"]
ROUND = ("float32", "bfloat16")
SHOWN = ((0, 0), (0, 11), (1, 23))


def read(folder: Path, **options: Any) -> tuple[Model, dict[str, Any]]:
    """Return the model in a folder, and its parameters."""
    hub = open_hub(folder)
    model_options = {"seq_len": 24, **hub.options, **options}
    model = resolve_model(hub.target, model_options)
    weights = weights_of(hub, model_options, stored_params(model))
    return model, {layer: weights.read(layer) for layer in weights.layers}


MOST = ("gpt2", "llama31", "llama-biases", "qwen3-yarn", "mistral", "smollm3")  # what differs at all


@pytest.mark.parametrize("kind", [k if k in MOST else pytest.param(k, marks=pytest.mark.soak) for k in KINDS])
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """A padded vocabulary changes none."""
    model, params = read(write_folder(tmp_path / kind, kind, shards=2), vocab_multiple=4)
    ours = np.asarray(jax.jit(lambda p: logits(model, p, TOKENS))(params))
    assert ours.shape == (2, 24, 40) and (ours[:, :, V:] < -1e29).all()
    expected = WANTED[kind]
    sample = [ours[row, t, :V:9] for row, t in SHOWN]
    np.testing.assert_allclose(sample, expected["shown"], rtol=0, atol=1e-5 * expected["largest"])
    np.testing.assert_allclose(np.abs(ours[:, :, :V]).max(), expected["largest"], rtol=1e-5)


@pytest.mark.parametrize("kind", EXPERTS)
def test_logits_of_experts_are_those_of_every_expert_on_every_token(kind: str, tmp_path: Path, x64: None) -> None:
    model, params = read(write_folder(tmp_path / kind, kind, shards=2), vocab_multiple=4)
    ours = np.asarray(jax.jit(lambda p: logits(model, p, TOKENS))(params))[:, :, :V]
    expected = hub_experts.logits(EXPERTS[kind], tensors(EXPERTS[kind]), TOKENS)
    np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_come_back_bit_for_bit(kind: str, tmp_path: Path) -> None:
    import_hub(write_folder(tmp_path / "given", kind), tmp_path / "run", seq_len=24)
    back = export_hub(tmp_path / "run", tmp_path / "back").path
    arrays = load_file(back / "model.safetensors")
    assert arrays.keys() == tensors(EXPERTS[kind]).keys()
    for name, array in tensors(EXPERTS[kind]).items():
        np.testing.assert_array_equal(arrays[name], array, err_msg=name)
    one, other = open_hub(tmp_path / "given"), open_hub(back)
    assert one.exchange.config({"seq_len": 24, **one.options}) == other.exchange.config(
        {"seq_len": 24, **other.options}
    )
    renamed = {"decoder_sparse_step", "mlp_only_layers"}  # which layers are dense has two spellings
    assert {key: other.config[key] for key in EXPERTS[kind].keys() - renamed} == {
        key: value for key, value in EXPERTS[kind].items() if key not in renamed
    }


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "top_k is 9, and there are 8 experts"),
        ("qwen3-moe-dense", {"mlp_only_layers": [4]}, r"mlp_only_layers is \[4\]"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"num_local_experts": "4"}, "num_local_experts is '4'"),
    ],
)
def test_mixtures_that_are_not_ours_are_refused_by_key(kind: str, changes: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        read(write_folder(tmp_path / kind, kind, **changes))


def test_gpt2_as_it_was_published(tmp_path: Path) -> None:
    """Without the prefix, with buffers of masks."""
    _, expected = read(write_folder(tmp_path / "given", "gpt2"))
    folder = write_folder(tmp_path / "published", "gpt2")
    bare = {name.removeprefix("transformer."): array for name, array in tensors(KINDS["gpt2"]).items()}
    masks = {
        f"h.{i}.attn.{name}": np.ones((1, 1, 24, 24), np.float32) for i in (0, 1) for name in ("bias", "masked_bias")
    }
    save_file(bare | masks, folder / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, read(folder)[1], expected)


@pytest.mark.parametrize("kind", ["llama31", "qwen3-yarn", "smollm3", "llama-biases"])
def test_both_forms_of_rotary_positions_are_read(kind: str, tmp_path: Path) -> None:
    old = open_hub(write_folder(tmp_path / "old", kind))
    scaling = {"rope_type": "default", **KINDS[kind].get("rope_scaling", {}), "rope_theta": KINDS[kind]["rope_theta"]}
    new = write_folder(tmp_path / "new", kind, rope_parameters=scaling, rope_theta=None, rope_scaling=None)
    assert open_hub(new).options == old.options


# --- there and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype", "shards"),
    [("gpt2", "float32", 1), ("qwen3-yarn", "bfloat16", 3)]
    + [pytest.param(kind, dtype, n, marks=pytest.mark.soak) for kind in KINDS for dtype in ROUND for n in (1, 3)],
)
def test_a_folder_comes_back_bit_for_bit(kind: str, dtype: str, shards: int, tmp_path: Path) -> None:
    source = write_folder(tmp_path / "given\n[run]\nsteps = 7 #", kind, shards=shards, dtype=DTYPES[dtype])
    config = import_hub(source, tmp_path / "run", seq_len=24).config
    assert load_config(tmp_path / "run" / "config.toml") == config  # the folder's name is in it, and no line of it
    size = np.dtype(DTYPES[dtype]).itemsize
    most = sum(array.size for array in tensors(KINDS[kind]).values()) * size // shards + 4096
    exported = export_hub(tmp_path / "run", tmp_path / "back", dtype=dtype, shard_bytes=most)
    assert len(exported.files) == shards or shards > 1
    back: dict[str, Any] = {}
    for file in exported.files:
        back |= load_file(file)
    assert back.keys() == tensors(KINDS[kind]).keys()
    for name, array in tensors(KINDS[kind]).items():
        assert back[name].dtype == DTYPES[dtype] and np.array_equal(back[name], array.astype(DTYPES[dtype])), name
    one, other = open_hub(source), open_hub(exported.path)
    assert one.exchange.config({"seq_len": 24, **one.options}) == other.exchange.config(
        {"seq_len": 24, **other.options}
    )
    assert other.config["torch_dtype"] == dtype and "rope_parameters" not in other.config


def test_numbers_too_large_for_float16_are_refused(tmp_path: Path) -> None:
    """They were written as infinity."""
    tensors = [Planned("w", (2,), lambda: np.array([1.0, 7e4], np.float32))]
    write_tensors(tmp_path, tensors, "bfloat16", 100)
    with pytest.raises(ConfigError, match=r"7e\+04.*float16"):
        write_tensors(tmp_path, tensors, "float16", 100)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_opens_what_comes_back(kind: str, tmp_path: Path) -> None:
    """Every tensor is in its place, and logits are those of the folder that went in."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    import_hub(write_folder(tmp_path / "given", kind), tmp_path / "run", seq_len=24)
    back = export_hub(tmp_path / "run", tmp_path / "back").path
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        back, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = model.eval().float()(torch.from_numpy(TOKENS).long(), use_cache=False).logits.numpy()
    expected = WANTED[kind]
    sample = [logits[row, t, ::9] for row, t in SHOWN]
    np.testing.assert_allclose(sample, expected["shown"], rtol=0, atol=2e-6 * expected["largest"])


def test_the_byte_vocabulary_as_a_tokenizer(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path, 64)
    text = "".join(map(chr, range(300))) + "žlutý 馬 🐎\r\n"
    tokenizer = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode(text).tolist() == list(text.encode()) and tokenizer.vocab_size == 256
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.id_of(json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"]) == 0


@pytest.mark.soak
def test_transformers_continues_a_text_as_we_do(tmp_path: Path) -> None:
    """Both continue a text greedily, by a run of bytes and its tokenizer."""
    transformers = pytest.importorskip("transformers")
    text = write_text(tmp_path / "text.txt")
    train(settings(text, tmp_path / "run", "data.seq_len=48", "run.steps=20"), io.StringIO())
    back = export_hub(tmp_path / "run", tmp_path / "back", step="best").path
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    model = transformers.AutoModelForCausalLM.from_pretrained(back).eval()
    prompt = "the cat sat"
    encoded = tokenizer(prompt, return_tensors="pt")
    generated = model.generate(**encoded, max_new_tokens=24, do_sample=False)
    ours = "".join(generate_text(load_trained(tmp_path / "run", step="best"), prompt, 24, temperature=0))
    assert tokenizer.decode(generated[0]) == prompt + ours


# --- heads that are tied, and names from elsewhere ------------------------------------------------------------------------

TIED = {"qwen2": "model.embed_tokens.weight", "gpt2": "transformer.wte.weight"}


@pytest.mark.parametrize("kind", TIED)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_tied_head_in_the_files_is_read_if_it_is_the_embedding(
    kind: str, shards: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "given", kind, shards=shards)
    _, expected = read(folder)
    words = tensors(KINDS[kind])[TIED[kind]]
    if shards == 1:
        rewrite(folder, **{"lm_head.weight": words})
    else:
        save_file({"lm_head.weight": words}, folder / "head.safetensors")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"]["lm_head.weight"] = "head.safetensors"
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    jax.tree.map(np.testing.assert_array_equal, read(folder)[1], expected)
    assert main(["import", str(folder), "-o", str(tmp_path / "run"), "--seq-len", "8"]) == 0
    assert f"lm_head.weight is {TIED[kind]} again" in capsys.readouterr().err
    notes: list[str] = []
    config = completed(begins_with(folder, "data.tokenizer=ids:37", "data.path=x.npy"))
    initial_params(config, build_model(config, V), {"embed"}, notes.append)
    assert len(notes) == 1 and "lm_head.weight" in notes[0]


@pytest.mark.parametrize("kind", TIED)
def test_a_tied_head_that_is_another_matrix_is_refused(kind: str, tmp_path: Path) -> None:
    words = tensors(KINDS[kind])[TIED[kind]].copy()
    words[-1, -1] += 1
    for other in (words, words[:-1]):
        folder = write_folder(tmp_path / f"given-{len(other)}", kind)
        rewrite(folder, **{"lm_head.weight": other})
        with pytest.raises(ConfigError, match=rf"lm_head.weight is not {TIED[kind]}.*tie_word_embeddings"):
            read(folder)


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "gone.safetensors"])
def test_a_tied_head_that_only_the_index_has_is_a_remark(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path / "given", "qwen2", shards=2)
    index = folder / "model.safetensors.index.json"
    index_body = json.loads(index.read_text())
    index.write_text(json.dumps({"weight_map": {**index_body["weight_map"], "lm_head.weight": file}}))
    assert main(["import", str(folder), "-o", str(tmp_path / "run"), "--seq-len", "8"]) == 0
    assert "lists lm_head.weight, which no file has" in capsys.readouterr().err
    edit(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"lm_head.weight|gone.safetensors"):
        read(folder)
    index.write_text(json.dumps({"weight_map": {**index_body["weight_map"], NORM: "model-00001-of-00002.safetensors"}}))
    edit(folder / "config.json", tie_word_embeddings=True)
    with pytest.raises(ConfigError, match=r"model.norm.weight"):
        read(folder)


@pytest.mark.parametrize("kind", ["llama2", "qwen2", "gpt2"])
@pytest.mark.parametrize("prefix", ["base_model.model.", "_orig_mod.", "module.", "_orig_mod.module.", "-model."])
def test_a_foreign_prefix_is_named(kind: str, prefix: str, tmp_path: Path) -> None:
    """Which no download mends; ``-``: the model's own prefix is missing."""
    folder = write_folder(tmp_path / "given", kind)
    if kind == "gpt2" and prefix.startswith("-"):
        pytest.skip("GPT-2 was published so")
    arrays = tensors(KINDS[kind])
    if prefix.startswith("-"):
        renamed = {name.removeprefix("model."): array for name, array in arrays.items() if name != "lm_head.weight"}
    else:
        renamed = {prefix + name: array for name, array in arrays.items()}
    save_file(renamed, folder / "model.safetensors")
    with pytest.raises(ConfigError) as caught:
        read(folder)
    assert repr(prefix.removeprefix("-")) in str(caught.value) and "download" not in str(caught.value)


# --- over a pipeline -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "pp", "tp", "dp"),
    [("gpt2", 1, 2, 1)]
    + [
        pytest.param(kind, *sizes, marks=pytest.mark.soak)
        for kind in ("gpt2", "llama-biases", "qwen2", "qwen3", "smollm3")
        for sizes in itertools.product((1, 2), repeat=3)
    ],
)
def test_loss_over_a_pipeline_is_that_of_transformers(kind: str, pp: int, tp: int, dp: int, tmp_path: Path) -> None:
    """The vocabulary has 37 words in 38 rows, of which the last learns nothing."""
    model, params = read(write_folder(tmp_path / kind, kind), vocab_multiple=2)
    schedule = generate("1f1b", pp, 2 // dp)
    cut = [(stage.start, stage.stop) for stage in plan_stages(model, pp).stages]
    pipe = Pipeline.build(model, schedule, microbatch_size=dp, boundaries=cut, tp=RankMesh(tp=tp), dp=dp)
    weights = np.ones((2, 24), np.float32)
    weights[:, -1] = 0
    rows = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, axis=1), "weights": weights}
    batch = {name: array.reshape(2 // dp, dp, 24) for name, array in rows.items()}
    loss, grads = pipe.loss_and_grads(pipe.place(params), batch)
    np.testing.assert_allclose(loss, WANTED[kind]["loss"], rtol=1e-5)
    words = np.asarray(grads["embed"]["tokens"]["embedding"])
    assert words[:V].any() and not words[V:].any()
    if "kernel" in grads["head"]:
        assert not np.asarray(grads["head"]["kernel"])[V:].any()


# --- runs that begin with given parameters -------------------------------------------------------------------------------


def begins_with(path: Path | str, *overrides: str) -> TrainConfig:
    return load_config(None, [f"run.init_from={path}", "data.seq_len=24", *overrides])


def _read_a_layer(config: TrainConfig, model: Model, processes: Processes) -> dict[str, Any]:
    return initial_params(config, model, {("embed", "head")[processes.mine]}, processes=processes)


def test_a_run_begins_with_a_folder_or_a_run_of_it(tmp_path: Path) -> None:
    """Each with the model and the numbers of the folder, and only the layers that a process has."""
    folder = write_folder(tmp_path / "given", "qwen2")
    _, expected = read(folder)
    run = import_hub(folder, tmp_path / "run", seq_len=24).path
    for source in (folder, run, f"{run}:0", run / "checkpoints" / "00000000"):
        config = completed(begins_with(source, "data.tokenizer=ids:37", "data.path=x.npy"))
        assert config.model.target == "jaxpipe.models.llama:Llama"
        assert config.model.options == open_hub(folder).options
        model = build_model(config, V)
        params = initial_params(config, model)
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        assert initial_params(config, model, {"embed", "head"}).keys() == {"embed", "head"}
        in_two = run_in_threads(2, partial(_read_a_layer, config, model))
        jax.tree.map(np.testing.assert_array_equal, in_two, [{name: expected[name]} for name in ("embed", "head")])
    meta = read_manifest(run).meta
    shutil.rmtree(folder)  # is not looked at by a run that goes on
    assert completed(begins_with(folder, "data.tokenizer=ids:37", "data.path=x.npy"), meta) == replace(
        config, run=replace(config.run, init_from=str(folder))
    )


def test_what_a_run_can_not_begin_with(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "given", "qwen2")
    run = import_hub(folder, tmp_path / "run", seq_len=24).path
    ids = ("data.tokenizer=ids:37", "data.path=x.npy")
    with pytest.raises(ConfigError, match=r"jaxpipe.models.llama:Llama.*model.target.*models.vlm:VLM"):
        completed(begins_with(run, "model.target=models.vlm:VLM", *ids))
    with pytest.raises(ConfigError, match="'hugging_face'"):
        completed(begins_with(folder, "model.target=models.vlm:VLM", *ids))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 7"):
        completed(begins_with(f"{run}:7", *ids))
    with pytest.raises(CheckpointError, match=r"does not exist"):
        completed(begins_with(tmp_path / "nothing", *ids))
    wider = completed(begins_with(folder, "model.options.mlp_size=64", *ids))
    with pytest.raises(ConfigError, match=r"is of shape \[32, 48\], and the model wants \[32, 64\]"):
        initial_params(wider, build_model(wider, V))
    with pytest.raises(ConfigError, match=r"exists; give -o a folder that does not"):
        export_hub(run, run)


@pytest.mark.soak
def test_an_imported_run_and_one_that_begins_with_the_folder_train_alike(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "given", "qwen3")
    run = import_hub(folder, tmp_path / "run", seq_len=24).path
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, V, 4000).astype(np.uint16))
    overrides = [
        "data.tokenizer=ids:37", f"data.path={tmp_path / 'ids.npy'}", "data.seq_len=24", "pipeline.ranks=2", "run.batch=4",
        "pipeline.microbatches=2", "run.steps=2", "run.eval_every=0", "optimizer.warmup_steps=1", "run.log_every=1",
        "pipeline.split_backwards=never",
    ]  # fmt: skip
    train(load_config(run / "config.toml", overrides), io.StringIO())
    train(
        load_config(None, [f"run.init_from={folder}", f"run.out_dir={tmp_path / 'other'}", *overrides]), io.StringIO()
    )
    one, other = (load_params(path) for path in (run, tmp_path / "other"))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert not np.array_equal(one["embed"]["tokens"]["embedding"], tensors(KINDS["qwen3"])["model.embed_tokens.weight"])


# --- folders that are not as they should be ------------------------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def rewrite(folder: Path, **changes: Any) -> None:
    """Change tensors of a folder; None takes one away."""
    arrays = load_file(folder / "model.safetensors") | changes
    save_file({name: array for name, array in arrays.items() if array is not None}, folder / "model.safetensors")


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def weights(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, **changes)


def write_into(name: str, text: str | bytes) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_bytes(text if isinstance(text, bytes) else text.encode()))


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def void(_: object) -> None: ...


NORM = "model.norm.weight"
SMALL = np.ones(4, np.float32)
EXPONENTS = {"rope_theta": 1e4, "rope_type": "longrope"}
BAD: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "not there": ("llama2", shutil.rmtree, "is no folder"),
    "a file": ("llama2", lambda f: void((shutil.rmtree(f), f.write_text("x"))), "is no folder"),
    "no config": ("llama2", lambda f: (f / "config.json").unlink(), "has no config.json"),
    "config no JSON": ("llama2", write_into("config.json", "{'a': 1}"), "is not JSON"),
    "config a list": ("llama2", write_into("config.json", "[1]"), "holds a list"),
    "config NaN": ("llama2", write_into("config.json", '{"model_type": NaN}'), "is not JSON"),
    "no kind": ("llama2", config(model_type=None), "model_type is None"),
    "unknown kind": ("llama2", config(model_type="gemma2"), "model_type is 'gemma2'"),
    "no width": ("llama2", config(hidden_size=None), "hidden_size is null"),
    "width of text": ("llama2", config(hidden_size="32"), "hidden_size is '32'"),
    "many layers": ("llama2", config(num_hidden_layers=20_000), "num_hidden_layers is 20000; want 1 to 10000"),
    "no layers": ("llama2", config(num_hidden_layers=0), "num_hidden_layers is 0"),
    "heads": ("llama2", config(num_attention_heads=5, num_key_value_heads=5), "num_attention_heads, 5"),
    "activation": ("llama2", config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "rope kind": ("llama2", config(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type is 'dynamic'"),
    "rope kind of 5": ("qwen3", config(rope_parameters=EXPONENTS), "rope_type is 'longrope'"),
    "rope factor": ("llama2", config(rope_scaling={"rope_type": "linear"}), "factor is missing"),
    "partial rotary": ("llama2", config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "mixed layers": (
        "qwen3",
        config(use_sliding_window=True, sliding_window=8, layer_types=["full_attention", "sliding_attention"] * 2),
        "layer_types is",
    ),
    "some windows": (
        "qwen2",
        config(use_sliding_window=True, sliding_window=8, max_window_layers=1),
        "max_window_layers",
    ),
    "no period": ("smollm3", config(no_rope_layers=[0, 1, 1, 1]), "no_rope_layers is"),
    "quantised": ("llama2", config(quantization_config={"bits": 4}), "quantised"),
    "odd MLP": ("gpt2", config(n_inner=100), "n_inner is 100"),
    "scaled scores": ("gpt2", config(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx is True"),
    "no weights": ("llama2", lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "pickled": (
        "llama2",
        lambda f: void((f / "model.safetensors").rename(f / "pytorch_model.bin")),
        "pytorch_model.bin",
    ),
    "cut short": ("llama2", cut_short, "is no whole safetensors file"),
    "no header": ("llama2", write_into("model.safetensors", b"x" * 999), "is no whole safetensors file"),
    "empty": ("llama2", write_into("model.safetensors", b""), "is no whole safetensors file"),
    "index no JSON": ("llama2", write_into("model.safetensors.index.json", "{"), "is not JSON"),
    "index of nothing": ("llama2", write_into("model.safetensors.index.json", "{}"), "has no weight_map"),
    "index of a lost file": (
        "llama2",
        write_into("model.safetensors.index.json", json.dumps({"weight_map": {NORM: "a.safetensors"}})),
        "a.safetensors is missing",
    ),
    "index elsewhere": (
        "llama2",
        write_into("model.safetensors.index.json", json.dumps({"weight_map": {NORM: "../x.safetensors"}})),
        "outside of its folder",
    ),
    "index of a lost tensor": (
        "llama2",
        write_into("model.safetensors.index.json", json.dumps({"weight_map": {"a": "model.safetensors"}})),
        "that does not contain it",
    ),
    "lost tensor": ("llama2", weights(**{NORM: None}), "has no tensor model.norm.weight"),
    "odd tensor": ("llama2", weights(**{"model.extra": SMALL}), "has the tensor model.extra"),
    "another shape": ("llama2", weights(**{NORM: SMALL}), "is of shape [4], and the model wants [32]"),
    "integers": ("llama2", weights(**{NORM: np.ones(32, np.int8)}), "is I8"),
    "not finite": ("llama2", weights(**{NORM: np.full(32, np.nan, np.float32)}), "is not finite"),
    "no tokenizer": ("llama2", write_into("tokenizer.json", "{}"), "not a Hugging Face tokenizer.json"),
    "more layers": ("llama2", config(num_hidden_layers=4), "has no tensor model.layers.3."),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_folder_is_one_line_and_nothing_is_written(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind, spoil, message = BAD[what]
    folder = write_folder(tmp_path / "given", kind)
    spoil(folder)
    assert main(["import", str(folder), "-o", str(tmp_path / "out" / "run")]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1 and captured.out == ""
    assert [path.name for path in tmp_path.iterdir() if path.name != "given"] == []
