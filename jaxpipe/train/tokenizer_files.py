"""Keep the tokenizer files of a run: those of the hub that its tokenizer came with, the chat template that it trains, and the
token that ends an answer.

A run keeps them when it starts, since their sources may go; ``jaxpipe export`` writes them beside the model. They are looked
for in several places, and those beside another ``tokenizer.json`` than the run's are not taken.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError, DataError
from jaxpipe.files import write_atomically
from jaxpipe.interop.folder import (
    FILES,
    GENERATION,
    JSON,
    SETTINGS,
    SPECIAL_IDS,
    TEMPLATE,
    TOKENIZER,
    TOKENS_MAP,
    copy_files,
    read_json,
    write_json,
)
from jaxpipe.train.checkpoints.directory import split_step
from jaxpipe.train.corpora.documents import BadRecordError
from jaxpipe.train.corpora.encoding import ChatTemplate, ends_of, find_template
from jaxpipe.train.corpora.store import Store, is_store
from jaxpipe.train.corpora.tokenizers import Tokenizer
from jaxpipe.train.settings.sections import DataConfig, names_function

_CONTENT = "xyzzy"  # an answer that no template has words of


def places_of(data: DataConfig, init_from: str | None, began_in: str = "") -> list[Path]:
    """Return folders that may hold the tokenizer's other files, the likeliest first. ``began_in``: where the run started."""
    at = Path(began_in)
    places = [at / data.tokenizer] if data.tokenizer != "byte" and not data.tokenizer.startswith("ids:") else []
    places = [path.parent for path in places] + [at / path for path in _paths(data)]
    if init_from:
        source = at / split_step(init_from)[0]
        places += [source, *(folder / TOKENIZER for folder in (source, source.parent, source.parent.parent))]
    return places


def training_form(data: DataConfig, tokenizer: Tokenizer, began_in: str = "") -> tuple[ChatTemplate | None, list[int]]:
    """Find what a run learns of the form of its texts: the chat template of the data, if they are chats, it can be read, and
    sources do not have several; and the ids that end answers and documents."""
    templates: list[ChatTemplate] = []
    ends: list[int | None] = []
    for path in (Path(began_in, path) for path in _paths(data)):
        with suppress(DataError, ConfigError):
            if is_store(path):
                spec, template_path = Store.read(path).spec, path / TEMPLATE
                is_chat, end = spec["documents_are"] == "chat", spec["eos"]
                files = str(path / JSON), str(template_path) if template_path.is_file() else "auto"
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
        write_atomically(to / JSON, tokenizer.content)
    places = [place for place in places if _is_of(place, tokenizer)]
    settings = [place for place in places if any((place / x).is_file() for x in (SETTINGS, TOKENS_MAP))][:1]
    if settings and settings[0].resolve() != to.resolve():
        copy_files(settings[0], to, [name for name in FILES if name not in (JSON, GENERATION)])
    for place in places:
        if not (to / GENERATION).is_file():
            copy_files(place, to, [GENERATION])
    if template is not None:
        to.mkdir(exist_ok=True)
        (to / TEMPLATE).write_text(template.source, encoding="utf-8")
    ids = special_ids(to, tokenizer)
    before = ids["eos_token_id"] if isinstance(ids["eos_token_id"], list) else [ids["eos_token_id"]]
    if tokenizer.content is not None and (new := [end for end in ends if end not in before]):
        all_ends = [*new, *(end for end in before if end is not None)]
        generation = read_json(to / GENERATION) if (to / GENERATION).is_file() else {}
        ids["eos_token_id"] = all_ends if len(all_ends) > 1 else all_ends[0]
        write_json(to / GENERATION, {**generation, **{key: value for key, value in ids.items() if value is not None}})


def special_ids(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return ``bos_token_id``, ``eos_token_id`` and ``pad_token_id`` as the files in ``folder`` have them; None where they
    don't."""
    tokens: dict[str, Any] = {}
    for name in (TOKENS_MAP, SETTINGS):
        tokens |= read_json(folder / name) if (folder / name).is_file() else {}
    ids: dict[str, Any] = {}
    for key in SPECIAL_IDS:
        token = tokens.get(key.removesuffix("_id"))
        token = token.get("content") if isinstance(token, dict) else token
        ids[key] = tokenizer.id_of(token) if isinstance(token, str) else None
    generation = read_json(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    return ids | {key: generation[key] for key in SPECIAL_IDS if generation.get(key) is not None}


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
    path = place / JSON
    if tokenizer.content is None or not path.is_file():
        return tokenizer.content is None and tokenizer.name != "byte" and not path.is_file()
    with suppress(ValueError, RecursionError):
        return bool(json.loads(path.read_bytes()) == json.loads(tokenizer.content))
    return False
