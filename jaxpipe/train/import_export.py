"""Models in and out: a folder of the Hugging Face hub as a run, ``run.init_from``, and a trained model as such a folder.

Tensors are read one at a time and written layer by layer, each group of layers as a part of the checkpoint, as several
processes would; so the whole model is never in memory. A run that begins with ``run.init_from`` holds, in each process, the
layers of its own ranks.

``transformers``, vLLM and lm-eval open an exported folder as it is. One layer of the checkpoint is read at a time, and one
tensor written at a time; the optimizer's state is not read.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe import __version__
from jaxpipe.errors import CheckpointError, ConfigError, DataError
from jaxpipe.files import hub_advice, write_atomically
from jaxpipe.interop import folder as hf
from jaxpipe.interop.hub import Hub, Weights, is_hub, open_hub, weights_of
from jaxpipe.interop.table import Tensor, hugging_face_of, leaf_shapes, rows_by_leaf
from jaxpipe.runtime.processes import Processes, SingleProcess
from jaxpipe.stage.model.layer import Model, Params
from jaxpipe.stage.model.params import by_path, get_leaf
from jaxpipe.stage.model.reference import ours
from jaxpipe.train.checkpoints import contents, folders, which_model
from jaxpipe.train.checkpoints.contents import Manifest
from jaxpipe.train.checkpoints.exchange import exchange, share_of_reading
from jaxpipe.train.checkpoints.leaves import Leaf, Snapshot, list_differences
from jaxpipe.train.config import TrainConfig, known_settings
from jaxpipe.train.corpora.documents import BadRecordError, in_groups
from jaxpipe.train.corpora.encoding import ChatTemplate, ends_of, find_template
from jaxpipe.train.corpora.store import Store, is_store
from jaxpipe.train.corpora.tokenizers import Tokenizer, load_tokenizer, stored_tokenizer
from jaxpipe.train.evaluate import Trained, described
from jaxpipe.train.settings.sections import DataConfig, names_function
from jaxpipe.train.setup import build_model

_PART_BYTES = 2**27
_SEQ_LEN = 1024
_DEFAULT = TrainConfig()
_CONTENT = "xyzzy"  # an answer that no template has words of
_ALONE = SingleProcess()


@dataclass(frozen=True, slots=True)
class Imported:
    """A run that :func:`import_hub` has made. ``parameters``: how many. ``remarks``: what of the folder is not read."""

    path: Path
    config: TrainConfig
    parameters: int
    remarks: tuple[str, ...] = ()


def import_hub(folder: Path, out: Path, *, target: str | None = None, seq_len: int | None = None) -> Imported:
    """Make the run ``out``, at step 0, of a folder of the hub. ``target``: the model, as ``module:function``; ``seq_len``: what
    the run is to train with, by default what the model has, at most 1024.

    Raises:
        ConfigError: the folder is not whole or fits no model, or ``out`` exists; nothing is left behind.
    """
    hub = open_hub(folder, target)
    config = _config_of(hub, out, seq_len)
    tokenizer = load_tokenizer(_tokenizer_of(hub))
    model = build_model(config, tokenizer.vocab_size)
    options = {"seq_len": config.data.seq_len, **config.model.options}
    weights = weights_of(hub, options, which_model.stored_params(model))
    with hf.new_folder(out) as temporary:
        hf.copy_files(hub.folder, temporary / hf.TOKENIZER)
        meta = {
            "jaxpipe": __version__,
            "program": which_model.model_digest(model),
            "config": config.to_dict(),
            "tokenizer": stored_tokenizer(tokenizer),
            "imported": str(folder.absolute()),
            **which_model.provenance(config),
        }
        _write_run(folders.folder_of(temporary / "checkpoints", 0), weights, meta)
        text = f"# Written by jaxpipe import, of {str(folder.absolute())!a}\n{config.to_toml()}"  # a line break ends a comment
        (temporary / "config.toml").write_text(text, encoding="utf-8")
    return Imported(out, config, sum(int(np.prod(shape)) for shape in weights.shapes.values()), weights.remarks)


def _config_of(hub: Hub, out: Path, seq_len: int | None) -> TrainConfig:
    most = hub.options.get("max_seq_len", _SEQ_LEN)
    length = min(most, _SEQ_LEN) if seq_len is None else seq_len
    tokenizer = _tokenizer_of(hub)
    tokenizer_path = str(out.absolute() / hf.TOKENIZER / "tokenizer.json") if tokenizer.endswith(".json") else tokenizer
    path = _DEFAULT.data.path if tokenizer.endswith(".json") else "tokens.npy"
    return replace(
        _DEFAULT,
        model=replace(_DEFAULT.model, target=hub.target, options=dict(hub.options)),
        data=replace(_DEFAULT.data, path=path, tokenizer=tokenizer_path, seq_len=length),
        run=replace(_DEFAULT.run, out_dir=str(out)),
    )


def _tokenizer_of(hub: Hub) -> str:
    """Return the tokenizer as ``data.tokenizer`` names it; ids alone where the folder has no ``tokenizer.json``."""
    file = hub.folder / "tokenizer.json"
    return str(file) if file.is_file() else f"ids:{hub.options['vocab_size']}"


def _write_run(folder: Path, weights: Weights, meta: dict[str, Any]) -> None:
    """One checkpoint, in parts of a few layers."""
    folder.mkdir(parents=True)
    count = 0
    layer_params = ((layer, weights.read(layer)) for layer in weights.layers)
    for count, group in enumerate(in_groups(layer_params, lambda item: _bytes(item[1]), _PART_BYTES), 1):
        layers = dict(group)
        leaves = [(layer, path, array) for layer, tree in layers.items() for path, array in by_path(tree).items()]
        snapshot = Snapshot(
            tuple(layers),
            tuple(Leaf(name, tuple(("key", k) for k in path), a.shape, a.dtype.name) for name, path, a in leaves),
            tuple(array for *_, array in leaves),
        )
        part = contents.part_of(folder, count - 1)
        try:
            contents.write_checkpoint(part, 0, None, meta, {"params": snapshot, "optimizer": Snapshot((), (), ())})
        except Exception as error:  # of Orbax, a full disk too
            raise ConfigError(
                f"the run can't be written: {contents.short_reason(error)}; make room, or choose another folder"
            ) from error
    contents.join_parts(folder, count)


def _bytes(params: Params) -> int:
    return sum(array.nbytes for array in jax.tree.leaves(params))


# --- run.init_from -------------------------------------------------------------------------------------------------------


def completed(config: TrainConfig, meta: Mapping[str, Any] | None = None) -> TrainConfig:
    """Return ``config`` with what it leaves open as the run's origin has it: the model and the tokenizer of ``run.init_from``;
    and how documents are masked and packed in the run so far, as another version may have another default. ``meta``: of the
    checkpoint that the run goes on from, if there is one: then ``run.init_from`` is not looked at.

    Raises:
        ConfigError, CheckpointError: there is no such folder or checkpoint, or it is of another model than the config's.
    """
    stored = _stored_settings(meta)
    if meta is not None and "imported" not in meta:
        then, now = stored.get("data", {}).get("reading", {}), config.data.reading
        open_keys = [key for key in ("mask", "pack") if getattr(now, key) == "auto" and then.get(key, "auto") != "auto"]
        config = config.changed({f"data.reading.{key}": then[key] for key in open_keys})
    if not config.run.init_from:
        return config
    if meta is None:
        path, step = folders.split_step(config.run.init_from)
        if not path.exists() and (advice := hub_advice(path)):
            raise CheckpointError(f"run.init_from={path}: it does not exist{advice}")
        if is_hub(path):
            hub = open_hub(path, config.model.target if config.says("model.target") else None)
            target, options, tokenizer = hub.target, hub.options, _tokenizer_of(hub)
        else:
            meta = folders.read_manifest(path, step).meta
            stored = _stored_settings(meta)
    if meta is not None:
        named = stored.get("model", {}).get("target")
        if named is None and meta.get("saved_by") == "Trainer" and config.says("model.target"):
            named = config.model.target  # which the Trainer did not know
        if named is None:
            raise CheckpointError(
                f"{config.run.init_from} does not say which model it is of; name what makes it with model.target and "
                "model.options, or use a checkpoint that says"
            )
        target, options = named, stored.get("model", {}).get("options", {})
        if not config.says("model.target"):
            target = which_model.importable(meta, "model", target, config.run.init_from, "model.target=")
        tokenizer = stored.get("data", {}).get("tokenizer", _DEFAULT.data.tokenizer)
        if meta.get("saved_by") == "Trainer" and tokenizer.startswith("ids:"):
            tokenizer = config.data.tokenizer  # none was given
    if config.says("model.target") and (ours(config.model.target) or config.model.target) != (ours(target) or target):
        raise ConfigError(
            f"run.init_from={config.run.init_from} is of {target}, and model.target is {config.model.target}; leave it out"
        )
    target = config.model.target if config.says("model.target") else target
    tokenizer = config.data.tokenizer if config.says("data.tokenizer") else tokenizer
    return replace(
        config,
        model=replace(config.model, target=target, options={**options, **config.model.options}),
        data=replace(config.data, tokenizer=tokenizer),
    )


def _stored_settings(meta: Mapping[str, Any] | None) -> Mapping[str, Mapping[str, Any]]:
    """Return the settings in a checkpoint's ``meta``, by section; none where it does not say."""
    stored = None if meta is None else meta.get("config")
    return known_settings(stored)[0] if isinstance(stored, dict) else {}


def initial_params(
    config: TrainConfig,
    model: Model,
    layers: Collection[str] | None = None,
    note: Callable[[str], None] = warnings.warn,
    processes: Processes = _ALONE,
) -> dict[str, Params]:
    """Read the parameters in ``run.init_from``, onto the host, of a completed config's model; of ``layers`` only, if given.
    ``note`` is told of options that differ from those of the checkpoint, where the model can't be compared, and what of a
    folder is not read. All ``processes`` call it, those of a row for the same layers, and read the same checkpoint.

    Raises:
        ConfigError, CheckpointError: they can't be read, or are of another model.
    """
    path, step = folders.split_step(config.run.init_from or "")
    like = which_model.stored_params(model)
    if is_hub(path):
        options = {"vocab_size": model.vocab_size, "seq_len": config.data.seq_len, **config.model.options}
        weights = weights_of(open_hub(path, config.model.target), options, like)
        for remark in weights.remarks:
            note(remark)
        return {layer: weights.read(layer) for layer in weights.layers if layers is None or layer in layers}

    def read(folder: Path) -> folders.GroupArrays:
        manifest = contents.read_manifest_of(folder)
        likeness = which_model.likeness(manifest.meta, which_model.model_digest(model, training=False))
        if likeness is not which_model.Likeness.SAME:
            _check_origin(folder, config, note)
        return folders.read_group(folder, "params", manifest, {"params": like}, layers, share_of_reading(processes))

    where = partial(folders.find, path, step)
    if processes.number > 1:
        # A run that saves there may make another one the newest, or the best, between two processes.
        inside = folders.run_on_all_processes(
            processes, "init_from", conclude=lambda _: os.path.relpath(folders.find(path, step), path)
        )
        where = partial(path.absolute().joinpath, inside)
    groups: list[folders.GroupArrays] = []
    folders.run_on_all_processes(processes, "parameters", lambda: groups.append(folders.reading(where, read)))
    exchange(groups, processes)
    return groups[0].place(None)


def _check_origin(folder: Path, config: TrainConfig, note: Callable[[str], None]) -> None:
    """Compare the model of ``run.init_from`` as its own settings make it, since a new run may have other options, and tell
    ``note`` which these are."""
    allow_other = config.run.init_other_model
    advice = ("model.target=", "run.init_other_model=true")
    _, trained = described(folder, config.model.target, other_model=allow_other, advice=advice)
    if trained.remark:
        note(f"warning: {trained.remark}")
    then, now = trained.config.model.options, config.model.options
    changed = [f"{key} {then.get(key, 'not set')} → {now[key]}" for key in sorted(now) if then.get(key) != now[key]]
    if changed:
        note(f"model.options other than in {config.run.init_from}: {', '.join(changed)}")


@dataclass(frozen=True, slots=True)
class Exported:
    """A folder that :func:`export_hub` has written. ``files``: of tensors. ``remark``: what is to be told of the model."""

    path: Path
    step: int
    parameters: int
    files: tuple[Path, ...]
    remark: str = ""


def export_hub(
    run: Path,
    out: Path,
    *,
    step: folders.StepName = None,
    model: str | Model | None = None,
    tokenizer: str | None = None,
    other_model: bool = False,
    dtype: str = "float32",
    shard_bytes: int = 5 * 10**9,
) -> Exported:
    """Write the model of a run, or of one checkpoint, into the new folder ``out``. ``step``, ``model``, ``tokenizer``,
    ``other_model``: as in :func:`jaxpipe.train.evaluate.load_trained`. ``dtype``: a key of
    :data:`jaxpipe.interop.folder.DTYPES`. ``shard_bytes``: the most of a file.

    Raises:
        CheckpointError: there is no intact checkpoint, or it does not fit its model.
        ConfigError: ``out`` exists, ``dtype`` is none of those, or transformers has no such model; nothing is left behind.
    """
    if dtype not in hf.DTYPES:
        raise ConfigError(f"dtype is {dtype!r}; want {', '.join(hf.DTYPES)}")
    if isinstance(model, Model) and which_model.known_origin(model) is None:
        raise ConfigError(
            f"{model.name} does not say what makes it, and the file of that says how it lies in folders of the hub; give "
            "model='module:function'"
        )
    with hf.new_folder(out) as temporary:

        def write(folder: Path) -> Exported:
            shutil.rmtree(temporary)  # of a try before
            temporary.mkdir()
            manifest, trained = described(folder, model, tokenizer=tokenizer, other_model=other_model)
            return _write_folder(folder, manifest, trained, temporary, out, dtype, shard_bytes)

        return folders.reading(partial(folders.find, run, step), write)


def _write_folder(
    folder: Path, manifest: Manifest, trained: Trained, to: Path, out: Path, dtype: str, shard_bytes: int
) -> Exported:
    config = trained.config
    exchange = hugging_face_of(config.model.target)
    options = {"vocab_size": trained.tokenizer.vocab_size, "seq_len": config.data.seq_len, **config.model.options}
    hub_config = exchange.config(options)
    like = which_model.stored_params(trained.model)
    if problems := list_differences(manifest.layers["params"], manifest.leaves["params"], like):
        raise ConfigError(f"checkpoint {folder} does not fit its model: {problems[0]}")
    shapes = leaf_shapes(like)
    table = exchange.tensors(options)
    rows_by_leaf(table, shapes)
    layers = _LayerReader(folder, manifest)
    tensors = [hf.Planned(row.name, row.shape(shapes[row.leaf]), partial(layers.tensor, row)) for row in table]
    files = hf.write_tensors(to, tensors, dtype, shard_bytes)
    positions = hub_config.get("max_position_embeddings", hub_config.get("n_positions", config.data.seq_len))
    ids = _write_tokenizer(folder, manifest, trained, to, positions)
    hf.write_json(
        to / hf.CONFIG,
        {**hub_config, "torch_dtype": dtype, "use_cache": True, "initializer_range": 0.02, **ids},
    )
    if not (to / hf.GENERATION).is_file():
        hf.write_json(to / hf.GENERATION, {name: ids[name] for name in hf.SPECIAL_IDS if ids[name] is not None})
    parameters = sum(map(math.prod, shapes.values()))
    return Exported(out, manifest.step, parameters, tuple(out / file.name for file in files), trained.remark)


class _LayerReader:
    """The layers of a checkpoint, the last one that was asked for in memory."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._name, self._params = "", dict[str, Any]()

    def tensor(self, row: Tensor) -> Any:
        if row.layer != self._name:
            self._params = {}  # before the next is read
            trees = folders.load_group(self._folder, "params", self._manifest, None, None, [row.layer])
            self._name, self._params = row.layer, trees[row.layer]
        return row.to_theirs(get_leaf(self._params, row.path))


def _write_tokenizer(folder: Path, manifest: Manifest, trained: Trained, to: Path, positions: int) -> Mapping[str, Any]:
    """Write the files that the run has kept, or else those that it would keep if it began now; returns the ids of the special
    tokens. ``positions``: the most tokens that the model takes."""
    tokenizer, data = trained.tokenizer, trained.config.data
    run_files = folder.parent.parent / hf.TOKENIZER  # of the run that the checkpoint is in
    if data.tokenizer == "byte":
        hf.write_byte_tokenizer(to, positions)
        hf.copy_files(run_files, to, [hf.TEMPLATE])
    run = manifest.meta["config"].get("run")
    init_from = run.get("init_from") if isinstance(run, dict) else None
    template, ends = (None, []) if "imported" in manifest.meta else training_form(data, tokenizer, trained.began_in)
    template = None if (run_files / hf.TEMPLATE).is_file() else template
    places = [run_files, *places_of(data, init_from if isinstance(init_from, str) else None, trained.began_in)]
    write_tokenizer_files(to, tokenizer, places, template, ends)
    if tokenizer.content is not None and not (to / hf.SETTINGS).is_file():
        end = next(iter(ends), tokenizer.eos)
        hf.write_tokenizer_config(to, positions, None if end is None else tokenizer.decode([end]))
    return special_ids(to, tokenizer) | ({"bos_token_id": 0, "eos_token_id": 0} if data.tokenizer == "byte" else {})


# -- tokenizer files -------------------------------------------------------------------------------------------------------
# A run keeps those of the hub that its tokenizer came with, the chat template that it trains and the token that ends an answer
# when it starts, since their sources may go; export writes them beside the model. Those beside another tokenizer.json than the
# run's are not taken.


def places_of(data: DataConfig, init_from: str | None, began_in: str = "") -> list[Path]:
    """Return folders that may hold the tokenizer's other files, the likeliest first. ``began_in``: where the run started."""
    at = Path(began_in)
    places = [at / data.tokenizer] if data.tokenizer != "byte" and not data.tokenizer.startswith("ids:") else []
    places = [path.parent for path in places] + [at / path for path in _paths(data)]
    if init_from:
        source = at / folders.split_step(init_from)[0]
        places += [source, *(folder / hf.TOKENIZER for folder in (source, source.parent, source.parent.parent))]
    return places


def training_form(data: DataConfig, tokenizer: Tokenizer, began_in: str = "") -> tuple[ChatTemplate | None, list[int]]:
    """Find what a run learns of the form of its texts: the chat template of the data, if they are chats, it can be read, and
    sources do not have several; and the ids that end answers and documents."""
    templates: list[ChatTemplate] = []
    ends: list[int | None] = []
    for path in (Path(began_in, path) for path in _paths(data)):
        with suppress(DataError, ConfigError):
            if is_store(path):
                spec, template_path = Store.read(path).spec, path / hf.TEMPLATE
                is_chat, end = spec["documents_are"] == "chat", spec["eos"]
                files = str(path / hf.JSON), str(template_path) if template_path.is_file() else "auto"
            else:
                is_chat, end = data.reading.format == "chat", ends_of(tokenizer, data.reading)[1]
                files = tokenizer.name, data.reading.chat_template
            ends.append(end)
            templates += [find_template(*files)] if is_chat else []
    # Sources with different templates train several forms; an export with one of them would claim what was not trained.
    template = templates[0] if len({template.source for template in templates}) == 1 else None
    if template is not None:
        ends.insert(0, end_of_answers(template, tokenizer))
    return template, [end for end in dict.fromkeys(ends) if end is not None]


def _paths(data: DataConfig) -> list[str]:
    """Return the files and folders of the data."""
    paths = [source.path for source in data.sources.values()] if data.sources else [data.path]
    return [path for path in paths if data.target is None and not names_function(path)]


def write_tokenizer_files(
    to: Path, tokenizer: Tokenizer, places: Sequence[Path], template: ChatTemplate | None, ends: Sequence[int]
) -> None:
    """Write into the folder ``to`` the ``tokenizer.json``, the files of the first of ``places`` that has settings for it, and
    the first ``generation_config.json``. A ``template`` that is trained is what is written, and the ids ``ends`` are of those
    that end generation. ``to`` may be one of the places; it is made for the first file.

    Raises:
        OSError: a file can't be written.
        ConfigError: a JSON file is damaged.
    """
    if tokenizer.content is not None:
        to.mkdir(exist_ok=True)
        # The folder may be the one that the run reads its tokenizer from.
        write_atomically(to / hf.JSON, tokenizer.content)
    places = [place for place in places if _is_of(place, tokenizer)]
    settings = [place for place in places if any((place / x).is_file() for x in (hf.SETTINGS, hf.TOKENS_MAP))][:1]
    if settings and settings[0].resolve() != to.resolve():
        hf.copy_files(settings[0], to, [name for name in hf.FILES if name not in (hf.JSON, hf.GENERATION)])
    for place in places:
        if not (to / hf.GENERATION).is_file():
            hf.copy_files(place, to, [hf.GENERATION])
    if template is not None:
        to.mkdir(exist_ok=True)
        (to / hf.TEMPLATE).write_text(template.source, encoding="utf-8")
    ids = special_ids(to, tokenizer)
    before = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    if tokenizer.content is not None and (new := [end for end in ends if end not in before]):
        all_ends = [*new, *(end for end in before if end is not None)]
        generation = hf.read_json(to / hf.GENERATION) if (to / hf.GENERATION).is_file() else {}
        ids["eos_token_id"] = all_ends if len(all_ends) > 1 else all_ends[0]
        hf.write_json(
            to / hf.GENERATION,
            {**generation, **{key: value for key, value in ids.items() if value is not None}},
        )


def special_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return ``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as the files in ``folder`` have them; None where they
    don't."""
    tokens: dict[str, Any] = {}
    for name in (hf.TOKENS_MAP, hf.SETTINGS):
        tokens |= hf.read_json(folder / name) if (folder / name).is_file() else {}
    ids: dict[str, Any] = {}
    for key in hf.SPECIAL_IDS:
        token = tokens.get(key.removesuffix("_id"))
        token = token.get("content") if isinstance(token, dict) else token
        ids[key] = tokenizer.id_of(token) if isinstance(token, str) else None
    generation = hf.read_json(folder / hf.GENERATION) if (folder / hf.GENERATION).is_file() else {}
    return ids | {key: generation[key] for key in hf.SPECIAL_IDS if generation.get(key) is not None}


def end_of_answers(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id of the added token that stands behind the text of an answer, if there is one."""
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _CONTENT}]
    try:
        text, spans = template.render(messages)
    except BadRecordError:
        return None
    rest = text[slice(*spans[-1])].partition(_CONTENT)[2] if spans else ""
    added = json.loads(tokenizer.content).get("added_tokens") or [] if tokenizer.content is not None else []
    ends = [(rest.find(token["content"]), -len(token["content"]), token["id"]) for token in added]
    # The first token behind the answer; of those that begin at one place the longest, as a tokenizer would find it.
    return min((end for end in ends if end[0] >= 0), default=(0, 0, None))[2]


def _is_of(place: Path, tokenizer: Tokenizer) -> bool:
    """Whether the folder is of this tokenizer, by the content of its ``tokenizer.json``."""
    path = place / hf.JSON
    if tokenizer.content is None or not path.is_file():
        return tokenizer.content is None and tokenizer.name != "byte" and not path.is_file()
    with suppress(ValueError, RecursionError):
        return bool(json.loads(path.read_bytes()) == json.loads(tokenizer.content))
    return False
