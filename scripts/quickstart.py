"""The main job: train a small GPT over a pipeline, then load the checkpoint without one and look at the result.

Run it through ./scripts/quickstart, which sets up the environment. Arguments are settings that override quickstart.toml::

    ./scripts/quickstart run.steps=400 pipeline.schedule=interleaved-1f1b

An interrupted run goes on where it stopped. Beside a finished one the next begins, in a directory with a number. Exit codes are
those of jaxpipe train.
"""

from __future__ import annotations

import io
import itertools
import sys
from dataclasses import replace
from pathlib import Path

from jaxpipe.errors import INTERRUPTED, READER_GONE, STOPPED, JaxpipeError
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.devices import request_devices
from jaxpipe.train.run.progress import ProgressStream, silence

CONFIG = Path(__file__).with_name("quickstart.toml")
SAMPLE_TOKENS = 300
PROMPT = "def "


def main(overrides: list[str]) -> int:
    if overrides and overrides[0] in ("-h", "--help"):
        print(__doc__)
        print(load_config(CONFIG).describe())
        return 0
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the sample may hold what this terminal can't show
    try:
        config = load_config(CONFIG, overrides)
        request_devices(max(config.pipeline.num_devices, config.run.machine.devices), config.run.machine.platform)
        return run(config)
    except BrokenPipeError:
        silence(sys.stdout)
        return READER_GONE
    except (JaxpipeError, OSError) as error:
        print(f"quickstart: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code if isinstance(error, JaxpipeError) else JaxpipeError.exit_code
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(config: TrainConfig) -> int:
    # JAX is imported from here on, after the devices were asked for.
    from jaxpipe.train.corpora import ngram
    from jaxpipe.train.corpora.datasets import load_dataset
    from jaxpipe.train.evaluate import generate, held_out_score, load_trained
    from jaxpipe.train.loop import train
    from jaxpipe.train.run.run_directory import result_text, score_table

    out = ProgressStream(sys.stdout)
    out_dir = unfinished(Path(config.run.out_dir), config.run.steps)
    if str(out_dir) != config.run.out_dir:
        out.print(f"{config.run.out_dir} holds a finished run, which stays; this one goes to {out_dir}")
        config = replace(config, run=replace(config.run, out_dir=str(out_dir)))
    result = train(config, out)
    out.print(result_text(result))
    if result.stopped:
        return STOPPED

    print("\nloading the checkpoint without a pipeline, on one device")
    trained = load_trained(out_dir)
    dataset = load_dataset(config)
    batches = dataset.held_out_batches(32, config.data.seq_len, 32)
    scores = {
        **ngram.baselines(dataset, batches),
        f"{trained.model.name}, step {trained.step}": held_out_score(trained, batches, dataset.bytes_per_token()),
    }
    print(f"held-out text, {sum(int(b['weights'].sum()) for b in batches):,} tokens:")
    print(score_table(scores, trained.model.loss_unit))
    print(f"\na sample of {SAMPLE_TOKENS} tokens after {PROMPT!r}:\n")
    print(PROMPT, end="")
    for piece in generate(trained, PROMPT, SAMPLE_TOKENS, temperature=0.7):
        print(piece, end="", flush=True)
    print(f"\n\npictures of the schedule as it ran: {out_dir / 'pictures'} (open timeline.html in a browser)")
    return 0


def unfinished(out_dir: Path, steps: int) -> Path:
    """``out_dir``, or the first of ``out_dir-2``, ``out_dir-3``, … that holds no run of so many steps."""
    from jaxpipe.train.checkpoint import CheckpointStore

    numbered = (out_dir.with_name(f"{out_dir.name}-{n}") for n in itertools.count(2))
    folders = itertools.chain([out_dir], numbered)
    return next(d for d in folders if (CheckpointStore(d / "checkpoints").latest() or 0) < steps)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
