"""Export of what was trained on chats: the template, the tokens that end, and what came with the model, by every way there."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxpipe.cli import main
from jaxpipe.interop.folder import FILES
from jaxpipe.stage.model.reference import resolve_model
from jaxpipe.train.config import load_config
from jaxpipe.train.corpora.encoding import ChatTemplate, find_template
from jaxpipe.train.corpora.tokenizers import HFTokenizer, load_tokenizer
from jaxpipe.train.evaluate import generate, load_trained
from jaxpipe.train.import_export import end_of_answers, import_hub
from jaxpipe.train.run.run_directory import RunDirectory
from tests.support.hub_folders import V, write_folder

pytestmark = pytest.mark.usefixtures("one_build")

pytest.importorskip("jinja2")
tokenizers = pytest.importorskip("tokenizers")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
OWN = TEMPLATE.replace("<|im_end|>", "<|end|>")
WORDS = ["[UNK]", "<|endoftext|>", "<|im_end|>", "<|im_start|>", "<|end|>", "<|pad|>", *"abcdefgh", "user", "assistant"]
CHATS = [[{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d e"}]] * 40
GENERATION = {"eos_token_id": [2, 1], "pad_token_id": 5, "temperature": 0.6}


def write_hub(folder: Path, *, jinja: bool = False) -> Path:
    """Return a small Qwen2 with a tokenizer, the template of its chats and what ends its texts."""
    write_folder(folder, "qwen2", bos_token_id=None, eos_token_id=1)
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.add_special_tokens([word for word in WORDS if "|" in word])
    backend.save(str(folder / "tokenizer.json"))
    tokens = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "pad_token": "<|pad|>"}
    template = {} if jinja else {"chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "model_max_length": 64, **template}))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    if jinja:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    (tmp_path / "sft.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    (tmp_path / "own.jinja").write_text(OWN)
    return write_hub(tmp_path / "HF")


def build(folder: Path, store: Path, *flags: str, tokenizer: str = "") -> Path:
    tokenizer = tokenizer or str(folder / "tokenizer.json")
    command = ["data", "build", str(folder.parent / "sft.jsonl"), "--chat", "-o", str(store), "--workers", "1"]
    assert main([*command, "--tokenizer", tokenizer, *flags]) == 0
    return store


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def template_in(folder: Path) -> str:
    return find_template(str(folder / "tokenizer.json"), "auto").source


def test_a_model_tuned_on_a_store_of_chats_is_exported_with_all_that_it_needs(hub: Path, tmp_path: Path) -> None:
    """The guide's commands export all of it, and again when the folder that it came from is gone."""
    store, run = build(hub, tmp_path / "ST"), tmp_path / "run"
    settings = [
        f"run.init_from={hub}", f"data.path={store}", f"data.tokenizer={store / 'tokenizer.json'}", "data.seq_len=16",
        f"run.out_dir={run}", "run.steps=2", "run.batch=2", "pipeline.ranks=1", "pipeline.microbatches=2",
        "run.eval_every=0", "optimizer.warmup_steps=1",
    ]  # fmt: skip
    assert main(["train", *settings]) == 0
    shutil.rmtree(store)
    for gone in (False, True):
        if gone:
            shutil.rmtree(hub)
        out = tmp_path / f"out-{gone}"
        assert main(["export", str(run), "-o", str(out)]) == 0
        assert template_in(out) == TEMPLATE
        config, tokens, generation = (read(out / f"{x}config.json") for x in ("", "tokenizer_", "generation_"))
        assert generation == GENERATION
        assert (tokens["bos_token"], tokens["eos_token"]["content"]) == ("<|endoftext|>", "<|im_end|>")
        assert tokens["model_max_length"] == config["max_position_embeddings"] == 64
        assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 1], 5)
        assert HFTokenizer(out / "tokenizer.json").vocab_size == len(WORDS)


def tokenizer_folder_of(run: Path, settings: Sequence[str]) -> Path:
    """Return the folder of tokenizer files that a run of these settings keeps when it begins."""
    config = load_config(None, [f"run.out_dir={run}", *settings])
    with RunDirectory(config.run) as directory:
        directory.keep_tokenizer(load_tokenizer(config.data.tokenizer), config)
    return run / "tokenizer"


@pytest.mark.parametrize("jinja", [False, True])
@pytest.mark.parametrize("way", ["store", "records", "only ids of the store", "bare tokenizer", "a run"])
def test_every_way_to_the_same_tokenizer_keeps_its_files(way: str, jinja: bool, hub: Path, tmp_path: Path) -> None:
    shutil.rmtree(hub)
    write_hub(hub, jinja=jinja)
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.json").write_text(json.dumps(read(hub / "tokenizer.json"), indent=3))
    match way:
        case "store":
            store = build(hub, tmp_path / "ST")
            settings = [f"data.path={store}", f"data.tokenizer={store / 'tokenizer.json'}"]
        case "records":
            settings = [f"data.path={tmp_path / 'sft.jsonl'}", "data.format=chat"]
            settings += [f"data.tokenizer={hub / 'tokenizer.json'}"]
        case "only ids of the store":  # the tokenizer lies apart from both
            store = build(hub, tmp_path / "ST")
            settings = [f"data.path={store}", f"data.tokenizer={bare / 'tokenizer.json'}"]
        case "bare tokenizer":
            settings = [f"data.tokenizer={bare / 'tokenizer.json'}", f"run.init_from={hub}", "data.path=x.txt"]
        case _:
            assert main(["import", str(hub), "-o", str(tmp_path / "imported")]) == 0
            settings = [f"data.tokenizer={bare / 'tokenizer.json'}", "data.path=x.txt"]
            settings += [f"run.init_from={tmp_path / 'imported'}:0"]
    folder = tokenizer_folder_of(tmp_path / "run", settings)
    assert template_in(folder) == TEMPLATE
    assert read(folder / "generation_config.json") == GENERATION
    assert read(folder / "tokenizer_config.json") == read(hub / "tokenizer_config.json")


@pytest.mark.parametrize("way", ["store", "records"])
def test_a_template_of_its_own_is_what_is_exported_and_its_end_ends_generation(
    way: str, hub: Path, tmp_path: Path
) -> None:
    template_path = str(tmp_path / "own.jinja")
    if way == "store":
        store = build(hub, tmp_path / "ST", "--chat-template", template_path)
        settings = [f"data.path={store}", f"data.tokenizer={store / 'tokenizer.json'}"]
    else:
        settings = [f"data.path={tmp_path / 'sft.jsonl'}", "data.format=chat", f"data.chat_template={template_path}"]
        settings += [f"data.tokenizer={hub / 'tokenizer.json'}"]
    folder = tokenizer_folder_of(tmp_path / "run", settings)
    assert template_in(folder) == OWN
    assert read(folder / "generation_config.json") == {
        **GENERATION,
        "bos_token_id": 1,
        "eos_token_id": [WORDS.index("<|end|>"), 2, 1],
    }


@pytest.mark.parametrize("way", ["store", "records"])
def test_a_token_that_ends_documents_ends_generation(way: str, hub: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n' * 9)
    if way == "store":
        command = [
            "data",
            "build",
            str(tmp_path / "a.jsonl"),
            "-o",
            str(tmp_path / "ST"),
            "--eos",
            "<|end|>",
            "--workers",
            "1",
        ]
        assert main([*command, "--tokenizer", str(hub / "tokenizer.json")]) == 0
        settings = [f"data.path={tmp_path / 'ST'}"]
    else:
        settings = [f"data.path={tmp_path / 'a.jsonl'}", "data.eos=<|end|>"]
    folder = tokenizer_folder_of(tmp_path / "run", [f"data.tokenizer={hub / 'tokenizer.json'}", *settings])
    assert read(folder / "generation_config.json")["eos_token_id"] == [WORDS.index("<|end|>"), 2, 1]
    assert template_in(folder) == TEMPLATE


def test_files_of_another_tokenizer_are_not_taken(hub: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    changed = read(hub / "tokenizer.json")
    changed["model"]["vocab"] |= {"zebra": V - 1}
    (other / "tokenizer.json").write_text(json.dumps(changed))
    settings = [f"data.tokenizer={other / 'tokenizer.json'}", f"run.init_from={hub}", "data.path=x.txt"]
    folder = tokenizer_folder_of(tmp_path / "run", settings)
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "generation_config.json"}
    assert read(folder / "generation_config.json") == {"eos_token_id": 1}  # <|endoftext|> ends its documents


def test_a_byte_vocabulary_keeps_the_template_of_its_chats(hub: Path, tmp_path: Path) -> None:
    template_path = str(tmp_path / "own.jinja")
    store = build(hub, tmp_path / "ST", "--chat-template", template_path, tokenizer="byte")
    folder = tokenizer_folder_of(tmp_path / "run", [f"data.path={store}"])
    assert [path.name for path in folder.iterdir()] == ["chat_template.jinja"]
    assert (folder / "chat_template.jinja").read_text() == OWN


def test_ids_of_config_json_end_texts_where_nothing_else_says_so(hub: Path, tmp_path: Path) -> None:
    (hub / "generation_config.json").unlink()
    assert main(["import", str(hub), "-o", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    assert read(tmp_path / "out" / "config.json")["eos_token_id"] == 1
    assert read(tmp_path / "out" / "generation_config.json")["eos_token_id"] == 1


def test_a_model_of_ids_keeps_the_files_that_came_with_it(hub: Path, tmp_path: Path) -> None:
    (hub / "tokenizer.json").unlink()
    (hub / "tokenizer.model").write_bytes(b"sentencepiece")
    assert main(["import", str(hub), "-o", str(tmp_path / "run")]) == 0
    assert main(["export", str(tmp_path / "run"), "-o", str(tmp_path / "out")]) == 0
    files = {path.name for path in (tmp_path / "out").iterdir()} & set(FILES)
    assert files == {"tokenizer.model", "tokenizer_config.json", "generation_config.json"}
    assert read(tmp_path / "out" / "config.json")["eos_token_id"] == [2, 1]


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (TEMPLATE, "<|im_end|>"),
        (OWN, "<|end|>"),
        (TEMPLATE.replace("{{ m.content }}", "{{ m.content }} h"), "<|im_end|>"),
        (TEMPLATE.replace("<|im_end|>", ";"), None),
        ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|end|>{% endfor %}", None),
        ("{{ raise_exception('a system message is missing') }}", None),
    ],
)
def test_what_ends_answers_is_what_the_template_writes_behind_them(template: str, end: str | None, hub: Path) -> None:
    end_id = end_of_answers(ChatTemplate(template, "t.jinja"), HFTokenizer(hub / "tokenizer.json"))
    assert end_id == (None if end is None else WORDS.index(end))


def test_ids_without_a_token_are_never_generated(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows past the tokenizer's vocabulary, gaps in it, and rows of padding; all have large logits."""
    vocab = read(hub / "tokenizer.json")
    vocab["model"]["vocab"] |= {"zebra": 30}
    (hub / "tokenizer.json").write_text(json.dumps(vocab))
    gaps = [*range(len(WORDS), 30), *range(31, V)]
    tensors = load_file(hub / "model.safetensors")
    tensors["model.embed_tokens.weight"][gaps] *= 4
    save_file(tensors, hub / "model.safetensors")
    run = hub.parent / "run"
    import_hub(hub, run, seq_len=8)
    ids: list[int] = []
    decode = HFTokenizer.decode
    monkeypatch.setattr(HFTokenizer, "decode", lambda self, new_ids: (ids.extend(new_ids), decode(self, new_ids))[1])
    trained = load_trained(run)
    options = {**trained.config.model.options, "vocab_multiple": 8}
    model, params = resolve_model(trained.config.model.target, {"seq_len": 8, **options}), {**trained.params}
    words = np.asarray(params["embed"]["tokens"]["embedding"])
    params["embed"] = {"tokens": {"embedding": np.concatenate([words, 9 * np.ones((40 - V, words.shape[1]))])}}
    ways = [(0.0, 0), (1.0, 0), (50.0, 0), (50.0, 3), (1.0, V)]
    for each, (temperature, top_k) in itertools.product((trained, replace(trained, model=model, params=params)), ways):
        assert len(list(generate(each, "a b", 40, temperature=temperature, top_k=top_k))) == 40
        assert ids and not set(ids) & {*gaps, *range(V, 40)}, (temperature, top_k)
        ids.clear()
