"""R20: chats and chat templates made at random, some of them to deceive. Answers are found or the chat is refused in one line;
each chat that fits is seen whole, once an epoch."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from torture_parts.trial import Bench, Case, FailedError, Trial


def chats(bench: Bench) -> Iterator[Case]:
    """R20."""
    for _ in range(bench.count(1000, 30)):
        yield Case("answers", _answers)
    for _ in range(bench.count(600, 20)):
        yield Case("epochs", _epochs)
    for hostile in (False, True):
        for _ in range(bench.count(200, 10)):
            yield Case("records", partial(_records, hostile=hostile))


_HEADS = ("<|im_start|>{r}\n", "[{r}] ", "{r}: ", "<{r}>", "<|start_header_id|>{r}<|end_header_id|>\n\n", "\n### {r}\n")
_CONTENTS = ("m.content", "m.content | trim", "m.content.split('</think>')[-1]", "m.content | upper", "m.content ~ ''")
_ENDS = (
    "<|im_end|>\n", "</s>", "\n", "", "<|eot_id|>", "{% if not loop.last %}\n{% endif %}",
    "{% if loop.last %}</s>{% endif %}", "{% if m.role == 'assistant' %}</s>{% endif %}",
)  # fmt: skip
_STARTS = (
    "", "<s>", "{{ strftime_now('%Y') }}", "{% if tools %}{{ tools | tojson }}{% endif %}",
    "{% if messages[0].role != 'system' %}Be brief.{% endif %}", "{% if documents is not none %}!{% endif %}",
)  # fmt: skip
_THOUGHTS = (
    "",
    "",
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}",
    "{% if loop.last %}{{ m.thought }}{% endif %}",
)
_PROMPTS = ("", "", "<think>\n", "<think>\n\n</think>\n\n")


def template_source(rng: random.Random, *, blocks: bool) -> str:
    """Return a template in the manner of those of the hub."""
    head, content, end, thought = (rng.choice(x) for x in (_HEADS, _CONTENTS, _ENDS, _THOUGHTS))
    body = f"{thought}{{{{ {content} }}}}{end}"
    body = "{% generation %}" + body + "{% endgeneration %}" if blocks else body
    role = "{{ m.role }}"
    return (
        rng.choice(_STARTS)
        + "{% for m in messages %}{% if m.role == 'assistant' %}"
        + head.format(r=role)
        + body
        + "{% else %}"
        + head.format(r=role)
        + "{{ m.content }}"
        + end
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}"
        + head.format(r="assistant")
        + rng.choice(_PROMPTS)
        + "{% endif %}"
    )


def _answers(trial: Trial) -> None:
    """Each span is where that answer stands, and holds nothing of another message."""
    from jaxpipe.train.corpora.documents import BadRecordError
    from jaxpipe.train.corpora.encoding import ChatTemplate, chat_in
    from tests.support.chats import chat

    rng = trial.rng
    blocks = rng.random() < 0.3
    source = template_source(rng, blocks=blocks)
    messages, _ = chat(rng, rng.randint(1, 4), rng.random() < 0.7)
    for message in messages:
        if message["role"] == "assistant" and rng.random() < 0.5:
            message["thought"] = f"‹{rng.randint(0, 99)} {rng.choice(('7', '</think>', chr(0xE000)))}›"
    template = ChatTemplate(source, "t.jinja", {})
    try:
        text, spans = template.render(*chat_in(messages, rng.choice((None, [{"name": "f"}]))))
    except BadRecordError as error:
        if "\n" in str(error):
            raise FailedError(f"not one line: {error!r}") from error
        trial.tried["chats refused"] += 1
        return
    kind = "with blocks" if blocks else "without blocks"
    trial.tried[f"chats of templates {kind}"] += 1
    assistants = [m for m in messages if m["role"] == "assistant"]
    where = f"{source!r}, {messages!r}: {text!r}, {spans}"
    if len(spans) != len(assistants) or any(a > b for a, b in itertools.pairwise(x for span in spans for x in span)):
        raise FailedError(f"{len(spans)} spans: {where}")
    for (a, b), message in zip(spans, assistants, strict=True):
        span, content = text[a:b], message["content"].split("</think>")[-1]
        spellings = (content, content.strip(), content.upper(), message["content"], message["content"].upper())
        if not any(each in span for each in spellings):
            raise FailedError(f"an answer is not in its span: {where}")
        openings = [f"«{m['content'][1:4]}".casefold() for m in messages if m["content"][0] == "«" and m is not message]
        if any(opening in span.casefold() for opening in openings):
            raise FailedError(f"a span holds another message: {where}")


def _epochs(trial: Trial) -> None:
    """Chats of any lengths: each that has an answer in its first tokens is seen once an epoch, in batches of changing sizes."""
    from jaxpipe.errors import DataError
    from jaxpipe.train.corpora.corpus import Corpus
    from jaxpipe.train.corpora.tokenizers import IdTokenizer
    from jaxpipe.train.data import TokenDataset

    rng = trial.rng
    seq_len, count = rng.randint(1, 40), rng.randint(2, 60)
    lengths = [rng.randint(1, rng.choice((5, 30, 90))) for _ in range(count)]
    edges = np.concatenate([[0], np.cumsum(lengths)])
    answers = (np.array([rng.random() for _ in range(edges[-1])]) < rng.choice((0.03, 0.3, 0.9))).astype(np.uint8)
    corpus = Corpus("chats", np.arange(edges[-1], dtype=np.uint16), edges, None, (), "f", answers)
    mask: Any = rng.choice(("causal", "document"))
    try:
        data = TokenDataset.split(
            corpus, IdTokenizer(1 << 16), rng.choice((0.0, 0.1, 0.4)), by=rng.choice(("blocks", "files")), mask=mask
        )
        state, step, at, rows = None, 0, 0, len(data.windows("train", seq_len))
        counts: Counter[int] = Counter()
        while at < rows:
            batch = rng.randint(1, rows)
            stream = data.batches(rng.randint(0, 3) if state is None else state.seed, batch, seq_len, state)
            for _ in range(rng.randint(1, 3)):
                arrays = stream.batch_at(step)
                step += 1
                is_learnt = arrays["weights"][: max(0, rows - at)] > 0
                if not is_learnt.any(1).all():
                    raise FailedError("a row without a target")
                counts.update(arrays["targets"][: len(is_learnt)][is_learnt].tolist())
                at += batch
            state = stream.state_at(step)
        trial.tried["epochs"] += 1
    except DataError as error:
        if "\n" in str(error):
            raise FailedError(f"not one line: {error}") from error
        trial.tried["corpora refused"] += 1
        return
    learnt: set[int] = set()
    for start, stop in itertools.pairwise(edges.tolist()):
        if any(a <= start and stop <= b for a, b in data.train):
            learnt |= {k for k in range(start + 1, min(stop, start + seq_len + 1)) if answers[k]}
        elif not any(a <= start and stop <= b for a, b in data.held_out):
            raise FailedError(f"a chat is cut in two by the holdout: {start}, {stop}, {data.train}, {data.held_out}")
    if counts != Counter(dict.fromkeys(learnt, 1)):
        raise FailedError(f"other targets than {len(learnt)} once: seq_len {seq_len}, lengths {lengths}")


_ODD = (None, 3, "", "x", [], {}, [None], {"a": None}, True, 1e400, "\ud800", [[]], "[", '{"a": 1}', "𝕏" * 50)


def _records(trial: Trial, hostile: bool) -> None:
    """A file of chats, one of them spoilt: data, or one line that names it."""
    from tests.support.chats import TEMPLATES, chat

    rng, path = trial.rng, trial.folder / "a.jsonl"
    records: list[dict[str, Any]] = [{"messages": chat(rng, rng.randint(1, 3), hostile)[0]} for _ in range(8)]
    record = records[rng.randrange(8)]
    spoilt = rng.choice(("messages", "tools", "role", "content", "tool_calls", "none"))
    if spoilt in ("messages", "tools"):
        record[spoilt] = rng.choice(_ODD)
    elif spoilt != "none":
        rng.choice(record["messages"])[spoilt] = rng.choice(_ODD)
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    name = rng.choice(list(TEMPLATES))
    (trial.folder / "t.jinja").write_text(TEMPLATES[name] if rng.random() < 0.9 else rng.choice(_BROKEN))
    settings = [
        f"data.path={path}",
        "data.format=chat",
        f"data.chat_template={trial.folder}/t.jinja",
        "data.seq_len=200",
    ]
    _load(path, settings, trial)


_BROKEN = (
    "", "{% for %}", "{{ messages.a.b.c }}", "{{ 1 / 0 }}", "{{ strftime_now(3) }}", "{{ messages[99].role }}",
    "{{ ''.__class__ }}", "{{ tools | length }}", "{% generation %}", "{{ [].pop() }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ raise_exception('no\nmore') }}", "{{ {} | tojson(indent='q', separators=3) }}",
    "{{ messages | tojson(indent=messages) }}",
)  # fmt: skip


def _load(path: Path, settings: list[str], trial: Trial) -> None:
    from jaxpipe.errors import JaxpipeError
    from jaxpipe.train.config import load_config
    from jaxpipe.train.corpora.datasets import load_dataset

    try:
        dataset = load_dataset(load_config(None, settings))
        dataset.batches(0, 2, 200).batch_at(3)
        trial.tried["files read"] += 1
    except JaxpipeError as error:
        trial.tried["files refused"] += 1
        if "\n" in str(error) or str(path.parent) not in str(error):
            raise FailedError(f"not one line that names the file: {error}") from error
