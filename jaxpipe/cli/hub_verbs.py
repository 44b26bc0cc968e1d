"""``import`` and ``export``: folders of the Hugging Face hub in and out."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jaxpipe.cli.machine_flags import without_devices
from jaxpipe.cli.outputs import notice
from jaxpipe.cli.parser import add_value, amount, whole_number
from jaxpipe.cli.train_verbs import add_checkpoint_flags
from jaxpipe.text import format_count


def configure_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="HF_DIR", help="folder of the hub: config.json, safetensors, tokenizer.json")
    add_value(parser, "-o --output", "RUN", str, "the run directory to create, at step 0", required=True)
    add_value(
        parser, "--model", "MODULE:FUNCTION", str, "the model that reads it; by default the one of its model_type"
    )
    length = whole_number("tokens", 2**31 - 1)
    add_value(parser, "--seq-len", "T", length, "data.seq_len of the run; by default the model's, at most 1024")


def run_import(args: argparse.Namespace) -> None:
    without_devices()
    from jaxpipe.train.import_export import import_hub

    imported = import_hub(Path(args.folder), Path(args.output), target=args.model, seq_len=args.seq_len)
    for remark in imported.remarks:
        notice(remark)
    print(
        f"{imported.config.model.target}, {format_count(imported.parameters)} parameters, in {imported.path} at step 0"
    )
    print(f"evaluate it with: jaxpipe eval {imported.path} --other-data --data PATH")
    print(f"train it with: jaxpipe train --config {imported.path / 'config.toml'} data.path=PATH")


def configure_export(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_flags(parser)
    add_value(parser, "-o --output", "DIR", str, "the folder to create", required=True)
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument(
        "--dtype", choices=dtypes, default="float32", help="dtype of the written tensors (default float32)"
    )
    size = amount("gigabytes", zero=False)
    add_value(parser, "--shard-size", "GB", size, "largest size of a file in gigabytes (10⁹ bytes)", 5.0)


def run_export(args: argparse.Namespace) -> None:
    without_devices()
    from jaxpipe.train.import_export import export_hub

    source, to, shard_bytes = Path(args.checkpoint), Path(args.output), int(args.shard_size * 1e9)
    which = {"step": args.step, "model": args.model, "tokenizer": args.tokenizer, "other_model": args.other_model}
    export = export_hub(source, to, **which, dtype=args.dtype, shard_bytes=shard_bytes)
    if export.remark:
        print(f"warning: {export.remark}", file=sys.stderr)
    files = f"{len(export.files)} file{'s' * (len(export.files) > 1)}"
    print(
        f"step {export.step}, {format_count(export.parameters)} parameters as {args.dtype} in {export.path} ({files})"
    )
