"""A run as lm-eval sees it, beside what jaxpipe says itself: bits per byte, choices and greedy text of its held-out text.

    python -m scripts.lm_eval.compare RUN -o FOLDER [--lm-eval PYTHON]

It exports the run to FOLDER/hf, writes the data of the three tasks beside this file to FOLDER (text.jsonl, choice.jsonl and
greedy.jsonl), runs lm-eval (https://github.com/EleutherAI/lm-evaluation-harness) offline on them under PYTHON, which has
``lm_eval[hf]``, and prints both sides as JSON. Exit code 1: bits per byte differ by more than 1e-6, or the choices or a greedy
text do.

lm-eval puts a token before each document (``bos_token_id`` of config.json) and cuts it into windows of ``seq_len`` targets;
each begins with the last token of the one before, as ours do, and the last one reaches back as far as it can. Does not cover
tokenizers that add tokens of their own to a text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxpipe.train.corpora.ngram import bits_per_byte
from jaxpipe.train.data import Batch, TokenDataset
from jaxpipe.train.evaluate import Trained, generate, held_out_score, load_data, load_trained, printable
from jaxpipe.train.import_export import export_hub
from scripts.provenance import commit_id

TASKS = Path(__file__).resolve().parent
PROMPT, CONTINUATION, CHOICES = 40, 48, 4  # tokens; greedy.yaml has the second one too
GREEDY = 8  # prompts
MOST = 1e-6


def window(ids: Sequence[int], prompt_length: int, seq_len: int) -> Batch:
    """Return the last ``seq_len + 1`` of ``ids`` as a batch of one sequence, whose targets from ``ids[given]`` on count."""
    first = max(0, len(ids) - seq_len - 1)
    inputs, targets = np.asarray(ids[first:-1], np.int32), np.asarray(ids[first + 1 :], np.int32)
    counts = np.arange(first + 1, len(ids)) >= prompt_length
    pad = (0, seq_len - len(inputs))
    weights = counts.astype(np.float32)
    return {n: np.pad(x, pad)[None] for n, x in (("tokens", inputs), ("targets", targets), ("weights", weights))}


def rolling(ids: Sequence[int], prefix: int, seq_len: int) -> list[Batch]:
    """Return the windows in which lm-eval scores a document."""
    stream = [prefix, *ids]
    ends = [*range(seq_len, len(ids), seq_len), len(ids)]
    return [window(stream[: end + 1], seq_len * k + 1, seq_len) for k, end in enumerate(ends)]


def documents(trained: Trained, count: int, windows: float) -> list[str]:
    """Return the beginning of up to ``count`` spans of the run's held-out text, of about so many windows each."""
    dataset, _ = load_data(trained)
    if not isinstance(dataset, TokenDataset):
        sys.exit("the run's data are no text")
    spans = list(dataset.pieces("held_out"))[:count]
    return [printable(trained.tokenizer.decode(ids[: int(windows * trained.model.seq_len)])) for ids in spans]


def ours(trained: Trained, texts: Sequence[str], prefix: int) -> tuple[dict[str, float], dict[str, list[Any]]]:
    """Return jaxpipe's scores on the three tasks, and their data."""
    seq_len, encode = trained.model.seq_len, trained.tokenizer.encode
    ids = [encode(text).tolist() for text in texts]
    rows = [row for document in ids for row in rolling(document, prefix, seq_len)]
    batch = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    batches = [{name: x[i : i + 16] for name, x in batch.items()} for i in range(0, len(rows), 16)]
    tokens, size = sum(map(len, ids)), sum(len(text.encode()) for text in texts)
    assert batch["weights"].sum() == tokens
    bits = bits_per_byte(held_out_score(trained, batches, None).loss, size / tokens)

    prompts = [printable(trained.tokenizer.decode(document[:PROMPT])) for document in ids]
    true = [printable(trained.tokenizer.decode(document[PROMPT : PROMPT + CONTINUATION])) for document in ids]
    choices = [[true[(k + n) % len(true)] for n in range(CHOICES)] for k in range(len(true))]
    right = 0
    for prompt, texts_of in zip(prompts, choices, strict=True):
        prompt_ids = encode(prompt).tolist()
        rows = [window([*prompt_ids, *encode(text).tolist()], len(prompt_ids), seq_len) for text in texts_of]
        losses = [held_out_score(trained, [row], None).loss * row["weights"].sum() for row in rows]
        right += int(np.argmin(losses)) == 0
    greedy = ["".join(generate(trained, prompt, CONTINUATION, temperature=0)) for prompt in prompts[:GREEDY]]
    assert bits is not None
    results = {"jaxpipe_text": bits, "jaxpipe_choice": right / len(prompts), "jaxpipe_greedy": 1.0}
    data: dict[str, list[Any]] = {
        "text": [{"text": text} for text in texts],
        "choice": [{"prompt": p, "choices": c, "answer": 0} for p, c in zip(prompts, choices, strict=True)],
        "greedy": [{"prompt": p, "continuation": c} for p, c in zip(prompts, greedy, strict=False)],
    }
    return results, data


def theirs(python: str, folder: Path) -> dict[str, Any]:
    """Return lm-eval's results for the data in ``folder`` and the model in ``folder/hf``: its results file."""
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"), "1")
    command = [python, "-m", "lm_eval", "run", "--model", "hf", "--model_args", "pretrained=hf,dtype=float32"]
    command += ["--tasks", "jaxpipe_text,jaxpipe_choice,jaxpipe_greedy", "--include_path", str(TASKS)]
    command += ["--device", "cpu", "--batch_size", "16", "--output_path", "results"]
    subprocess.run(
        command, cwd=folder, env=os.environ | offline | {"HF_HOME": str(folder.resolve() / "cache")}, check=True
    )
    (path,) = (folder / "results").rglob("results_*.json")
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def compare(run: Path, folder: Path, python: str, count: int = 32, windows: float = 8.5) -> dict[str, Any]:
    """Both sides of a run, its files in the new folder ``folder``."""
    folder.mkdir(parents=True)
    exported = export_hub(run, folder / "hf")
    config = json.loads((exported.path / "config.json").read_text(encoding="utf-8"))
    trained = load_trained(run, step=exported.step)
    texts = documents(trained, count, windows)
    our_results, data = ours(trained, texts, config["bos_token_id"] or config["eos_token_id"] or 0)
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    report = theirs(python, folder)
    metrics = {"jaxpipe_text": "bits_per_byte", "jaxpipe_choice": "acc", "jaxpipe_greedy": "exact_match"}
    metrics_of = {task: report["results"][task][f"{metric},none"] for task, metric in metrics.items()}
    return {
        "step": exported.step,
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "greedy_texts": len(data["greedy"]),
        "jaxpipe": our_results,
        "lm_eval": metrics_of,
        "bits_per_byte_differ": abs(metrics_of["jaxpipe_text"] - our_results["jaxpipe_text"]),
        "versions": {name: report.get(f"{name}_version") for name in ("lm_eval", "transformers")},
        "commit": commit_id(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True, help="a folder, which is made")
    parser.add_argument("--lm-eval", metavar="PYTHON", default=sys.executable, help="a Python that has lm_eval")
    parser.add_argument("--documents", type=int, default=32)
    args = parser.parse_args()
    report = compare(args.run, args.out, args.lm_eval, args.documents)
    print(json.dumps(report, indent=1))
    same = all(report["jaxpipe"][task] == report["lm_eval"][task] for task in ("jaxpipe_choice", "jaxpipe_greedy"))
    sys.exit(not (report["bits_per_byte_differ"] <= MOST and same))


if __name__ == "__main__":
    main()
