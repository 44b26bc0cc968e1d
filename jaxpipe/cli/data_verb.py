"""The verb ``data``: token stores, built and checked."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxpipe.cli.outputs import notice, print_json
from jaxpipe.cli.parser import add_json_flag, add_switch, add_value, whole_number
from jaxpipe.errors import ConfigError
from jaxpipe.text import closest

if TYPE_CHECKING:
    from jaxpipe.train.corpora.store import Store

ACTIONS = ("build", "check")


def configure_data(parser: argparse.ArgumentParser) -> None:
    text = (
        "'build' tokenises sources into a store, or goes on with one that was begun; 'check' compares all its checksums"
    )
    parser.add_argument("action", metavar="ACTION", help=text)
    text = "build: files and folders of JSONL, Parquet and text; check: stores"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=text)
    add_value(parser, "-o --output", "STORE", str, "build: the folder to create")
    add_value(parser, "--tokenizer", "NAME", str, "as data.tokenizer", "byte")
    add_value(parser, "--chat-template", "FILE", str, "as data.chat_template", "auto")
    add_value(parser, "--chat-date", "DATE", str, "as data.chat_date", "auto")
    add_value(parser, "--field", "NAME", str, "as data.field", "auto")
    add_value(parser, "--eos", "TOKEN", str, "as data.eos; with tokenizer byte, text files end with 0, too", "auto")
    add_value(parser, "--bos", "TOKEN", str, "as data.bos", "auto")
    add_value(parser, "--suffixes", "LIST", str, "as data.suffixes, joined by commas")
    text = "processes that tokenise; by default one a core"
    add_value(parser, "--workers", "N", whole_number("processes", 1024), text)
    add_switch(parser, "--chat", "short for --format chat: records are chats")
    parser.add_argument("--format", choices=("auto", "text", "chat"), help="as data.format (default auto)")
    add_json_flag(parser)


def run_data(arguments: argparse.Namespace) -> None:
    """Build a store, or check some.

    Raises:
        ConfigError: another action, or no folder to build.
        DataError: what is wrong with a source or a store.
    """
    action = arguments.action
    if arguments.chat and arguments.format not in (None, "chat"):
        raise ConfigError(f"data build takes --chat or --format {arguments.format}, not both")
    if action not in ACTIONS:
        raise ConfigError(f"data {action!r}{closest(action, ACTIONS)}; want one of: {', '.join(ACTIONS)}")
    if (action == "build") == (arguments.output is None):
        raise ConfigError(
            "data build needs -o STORE, the folder to create" if action == "build" else "data check takes no -o"
        )
    from jaxpipe.train.corpora.store import Store

    paths = [Path(path) for path in arguments.paths]
    started = time.perf_counter()
    if action == "build":
        stores = [_built(arguments, paths)]
    else:
        stores = [Store.read(path) for path in paths]
        for store in stores:
            store.check(every_piece=True)
            store.check_tokenizer()
    seconds = time.perf_counter() - started
    store_records = [
        {"store": str(s.folder), "documents": s.documents, "tokens": s.tokens, "fingerprint": s.fingerprint}
        for s in stores
    ]
    if arguments.json:
        print_json({"stores": store_records, "seconds": seconds})
        return
    for each in store_records:
        print(f"{each['store']}: {each['documents']:,} documents, {each['tokens']:,} tokens, intact ({seconds:.1f} s)")


def _built(arguments: argparse.Namespace, sources: list[Path]) -> Store:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are what runs side by side
    from jaxpipe.train.corpora.documents import SUFFIXES
    from jaxpipe.train.corpora.encoding import Reading
    from jaxpipe.train.corpora.store import build_store
    from jaxpipe.train.corpora.tokenizers import load_tokenizer

    suffixes = SUFFIXES if arguments.suffixes is None else tuple(arguments.suffixes.split(","))
    reading = Reading(
        format=arguments.format or ("chat" if arguments.chat else "auto"),
        chat_template=arguments.chat_template,
        chat_date=arguments.chat_date,
        field=arguments.field,
        eos=arguments.eos,
        bos=arguments.bos,
        suffixes=suffixes,
    )
    workers = arguments.workers or len(os.sched_getaffinity(0))
    tokenizer = load_tokenizer(arguments.tokenizer)
    return build_store(sources, Path(arguments.output), tokenizer, reading, workers=workers, note=notice)
