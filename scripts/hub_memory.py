"""Peak host memory of ``jaxpipe import`` and ``jaxpipe export``: a billion random parameters in and out again.

    python -m scripts.hub_memory FOLDER [--shard-size 1.0]

Each verb runs in a process of its own; its peak (VmHWM, Linux) is shown beside 1.2 times the largest file plus 1 GiB. The files
that come out must be those that went in. It writes 9 GB into FOLDER, which it makes, and takes minutes.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxpipe.interop.folder import Planned, write_tensors
from tests.support.hub_folders import BOTH, shapes

CONFIG = {
    **BOTH,
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
PEAK = """
import sys
from jaxpipe.cli import main
code = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""


def random_bfloat16(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Any bits but those of large numbers, infinity and NaN."""
    bits = rng.integers(0, 2**16, shape, dtype=np.uint16) & np.uint16(0xBFFF)
    return bits.view(ml_dtypes.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shard-size", type=float, default=1.0, help="gigabytes a file")
    args = parser.parse_args()
    source, run, back = (args.folder / name for name in ("given", "run", "back"))
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(CONFIG))
    rng, sizes = np.random.default_rng(0), shapes(CONFIG)
    planned = [Planned(name, shape, partial(random_bfloat16, rng, shape)) for name, shape in sizes.items()]
    files = write_tensors(source, planned, "bfloat16", int(args.shard_size * 1e9))
    most = 1.2 * max(file.stat().st_size for file in files) + 2**30
    export = ["export", run, "-o", back, "--dtype", "bfloat16", "--shard-size", args.shard_size]
    for verb in (["import", source, "-o", run], export):
        began = time.perf_counter()
        completed = subprocess.run(
            [sys.executable, "-c", PEAK, *map(str, verb)], stdout=subprocess.PIPE, text=True, check=True
        )
        peak = int(completed.stdout.split()[-1]) * 1024
        print(f"{verb[0]}: peak {peak / 1e9:.2f} GB of {most / 1e9:.2f} GB, {time.perf_counter() - began:.0f} s")
        assert peak <= most
    same = all(filecmp.cmp(file, back / file.name, shallow=False) for file in files)
    parameters = sum(int(np.prod(shape)) for shape in sizes.values())
    print(
        f"{parameters / 1e9:.2f} G parameters in {len(files)} files: {'the same' if same else 'other'} bytes came back"
    )


if __name__ == "__main__":
    main()
