"""The main job: train a small GPT over a pipeline, then load the checkpoint without one and look at the result.

Run it through ./scripts/quickstart, which sets up the environment. Arguments are settings that override quickstart.toml::

    ./scripts/quickstart run.steps=400 pipeline.schedule=interleaved-1f1b

An interrupted run goes on where it stopped; a finished one is replaced.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from jaxpipe.errors import JaxpipeError
from jaxpipe.train.config import TrainConfig, load_config
from jaxpipe.train.devices import request_devices

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
        request_devices(max(config.pipeline.num_devices, config.run.devices), config.run.platform)
        return run(config)
    except (JaxpipeError, OSError) as error:
        print(f"quickstart: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130


def run(config: TrainConfig) -> int:
    # JAX is imported from here on, after the devices were asked for.
    from jaxpipe.train import ngram
    from jaxpipe.train.checkpoint import CheckpointStore
    from jaxpipe.train.evaluate import generate, held_out_score, load_trained
    from jaxpipe.train.loop import train
    from jaxpipe.train.report import result_text, score_table
    from jaxpipe.train.run_directory import remove_run
    from jaxpipe.train.setup import load_dataset

    out_dir = Path(config.run.out_dir)
    if (CheckpointStore(out_dir / "checkpoints").latest() or 0) >= config.run.steps:
        print(f"replacing the finished run in {out_dir}")
        remove_run(out_dir)
    result = train(config)
    print(result_text(result))
    if result.stopped:
        return 0

    print("\nloading the checkpoint without a pipeline, on one device")
    trained = load_trained(out_dir)
    dataset = load_dataset(config)
    batches = dataset.held_out_batches(32, config.data.seq_len, 32)
    scores = {
        **ngram.baselines(dataset, batches),
        f"{trained.model.name}, step {trained.step}": held_out_score(trained, batches, dataset.bytes_per_token()),
    }
    print(f"held-out text, {sum(int(b['weights'].sum()) for b in batches):,} tokens:")
    print(score_table(scores))
    print(f"\na sample of {SAMPLE_TOKENS} tokens after {PROMPT!r}:\n")
    print(PROMPT, end="")
    for piece in generate(trained, PROMPT, SAMPLE_TOKENS, temperature=0.7):
        print(piece, end="", flush=True)
    print(f"\n\npictures of the schedule as it ran: {out_dir / 'pictures'} (open timeline.html in a browser)")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
