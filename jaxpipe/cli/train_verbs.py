"""The verbs about models: ``train``, ``eval``, ``generate``, ``profile``. JAX is imported only once flags have been read."""

from __future__ import annotations

import argparse
import json
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe import dump
from jaxpipe.cli.exit_codes import EXIT_CODES, INTERRUPTED, STOPPED, explained
from jaxpipe.cli.outputs import add_costs_flag, check_output, notice
from jaxpipe.cli.parallel_flags import add_parallel_flags, with_parallel_flags
from jaxpipe.cli.parser import add_json_flag, add_switch, add_value, amount, whole_number
from jaxpipe.errors import AgreedError, short_message
from jaxpipe.launch.local import follow_launcher
from jaxpipe.runtime.peers import find_peers
from jaxpipe.runtime.processes import Processes, ProcessGroup, SingleProcess

if TYPE_CHECKING:
    from jaxpipe.train.config import TrainConfig
    from jaxpipe.train.evaluate import Trained

_MOST = 10**9
_MOST_PROCESSES = 65536


def _configure_config(parser: argparse.ArgumentParser) -> None:
    add_value(parser, "--config", "FILE", str, "TOML or JSON settings; without it the defaults")
    text = "settings that override the file, such as run.steps=200"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=text)
    add_parallel_flags(parser)


def configure_train(parser: argparse.ArgumentParser) -> None:
    _configure_config(parser)
    add_switch(parser, "--print-config", "print all settings (changed ones marked *) and stop")
    add_switch(parser, "--help-config", "explain all settings and stop")
    text = "where devices have no pinned host memory, offload to ordinary host arrays, slowly (offload.fallback=true)"
    add_switch(parser, "--offload-fallback", text)
    add_json_flag(parser, "print the result as JSON on stdout, progress on stderr")
    group = parser.add_argument_group("several processes", "found in the variables of a launcher, too (jaxpipe launch)")
    add_value(group, "--coordinator", "HOST:PORT", str, "address of process 0; the same for all processes")
    count = whole_number("processes", _MOST_PROCESSES)
    add_value(group, "--processes", "N", count, "number of processes (default: one)")
    which = whole_number("as a process", _MOST_PROCESSES - 1, least=0)
    add_value(group, "--process", "K", which, "index of this process, from 0")
    add_value(group, "--join-wait", "S", amount("seconds", zero=False), "seconds to wait for other processes", 300.0)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "exit codes:\n" + "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items())


def config_of(args: argparse.Namespace) -> TrainConfig:
    """Build the config from the flags of ``train``."""
    from jaxpipe.train.config import load_config

    fallback = ["offload.fallback=true"] if args.offload_fallback else []
    return load_config(args.config, [*with_parallel_flags(args, args.overrides), *fallback])


def run_train(args: argparse.Namespace) -> int:
    if args.help_config:
        from jaxpipe.train.config import explain_settings

        print(explain_settings())
        return 0
    if args.print_config:
        print(config_of(args).describe())
        return 0
    from jaxpipe.train.run.ending import EndingEarly

    with ExitStack() as stack:
        processes: Processes = SingleProcess()
        with EndingEarly(lambda how, code: processes.end(how, code)):
            follow_launcher()
            if peers := find_peers((args.coordinator, args.processes, args.process)):
                processes = ProcessGroup(peers, args.join_wait)
                dump.own_folder(peers.mine)
            stack.enter_context(ending_together(processes))
            config = config_of(args)
            from jaxpipe.train.devices import request_devices
            from jaxpipe.train.run.agreement import agree_on_settings

            agree_on_settings(processes, config)
            devices = max(config.pipeline.num_devices, config.run.machine.devices)
            if processes.number > 1:
                local_ranks = processes.ranks(config.pipeline.ranks)[processes.mine]
                devices = len(local_ranks) * config.pipeline.rank_devices
            request_devices(devices, config.run.machine.platform, processes=processes.number)
            processes.start_jax()
            from jaxpipe.planning.targets import peak_of
            from jaxpipe.train.loop import train
            from jaxpipe.train.run.progress import ProgressStream
            from jaxpipe.train.run.run_directory import result_json, result_text

        out = ProgressStream(sys.stdout)
        progress_out = sys.stderr if args.json else out
        result = train(config, progress_out, own_process=True, processes=processes, peak_flops_per_s=peak_of)
    if processes.mine == 0:
        out.print(json.dumps(result_json(result), allow_nan=False) if args.json else result_text(result))
    return STOPPED if result.stopped else 0


@contextmanager
def ending_together(processes: Processes) -> Iterator[None]:
    """End all processes with one line and exit code when one of them fails inside the block; a process that succeeds waits
    for the others."""
    try:
        yield
    except AgreedError:  # in all of them
        processes.leave()
        raise
    except BaseException as error:
        line, code = explained(error) or (f"{type(error).__name__}: {short_message(error)}", 1)
        if code == 1 and processes.number > 1:
            traceback.print_exc()
        processes.end("was interrupted" if code == INTERRUPTED else f"failed: {line}", code)
        raise
    processes.leave()


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a checkpoint and the function that makes its model."""
    parser.add_argument("checkpoint", metavar="RUN", help="a run directory, its checkpoints folder, or one checkpoint")
    add_value(parser, "--step", "N", _step, "the checkpoint of step N, or 'best' (lowest loss); the newest by default")
    text = (
        "what makes the model, needed where the checkpoint names code outside of models, which runs only if you name it"
    )
    add_value(parser, "--model", "MODULE:FUNCTION", str, text)
    add_switch(parser, "--other-model", "accept a model whose computation has changed since the checkpoint")
    text = (
        "byte, a tokenizer.json or ids:N, where the checkpoint has no tokenizer, as those of Trainer.save without one"
    )
    add_value(parser, "--tokenizer", "SPEC", str, text)


def _add_devices_flag(parser: argparse.ArgumentParser) -> None:
    many = "devices to put the layers on, emulated on a CPU; by default as few as hold them"
    add_value(parser, "--devices", "N", whole_number("devices", 512), many)


def _load(args: argparse.Namespace) -> Trained:
    """Load the model that the flags name; report unknown config keys on stderr."""
    from jaxpipe.train.evaluate import load_trained

    trained = load_trained(
        args.checkpoint,
        step=args.step,
        model=args.model,
        tokenizer=args.tokenizer,
        devices=args.devices,
        other_model=args.other_model,
    )
    if trained.remark:
        print(f"warning: {trained.remark}", file=sys.stderr)
    if trained.ignored:
        print(f"ignored settings that this version does not know: {', '.join(trained.ignored)}", file=sys.stderr)
    return trained


def _step(text: str) -> int | str:
    """Parse ``--step``."""
    if text == "best":
        return text
    if not re.fullmatch("[0-9]{1,12}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no step; want a whole number, or best")
    return int(text)


def configure_eval(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_flags(parser)
    _add_devices_flag(parser)
    add_value(parser, "--batch", "N", whole_number("sequences", 65536), "sequences per batch", 16)
    add_value(parser, "--batches", "N", whole_number("batches", _MOST), "at most N batches; all by default")
    add_switch(parser, "--baselines", "also score unigram and bigram models of the same text")
    add_switch(parser, "--other-data", "evaluate on data other than those the model was trained on")
    add_value(parser, "--data", "PATH", str, "data.path in place of the run's; a module:function must be named so")
    add_json_flag(parser, "print JSON")


def run_eval(args: argparse.Namespace) -> None:
    from jaxpipe.train.devices import device_errors, request_devices

    request_devices(args.devices or 1)
    from jaxpipe.train.corpora import ngram
    from jaxpipe.train.evaluate import held_out_score, load_data
    from jaxpipe.train.setup import data_remarks

    trained = _load(args)
    dataset, other = load_data(trained, other=args.other_data, path=args.data)
    for remark in data_remarks(dataset):
        notice(remark)
    batches = dataset.held_out_batches(args.batch, trained.config.data.seq_len, args.batches)
    scores: dict[str, Any] = dict(ngram.baselines(dataset, batches)) if args.baselines else {}
    with device_errors("eval"):
        scores["model"] = held_out_score(trained, batches, dataset.bytes_per_token())
    from jaxpipe.train.run.run_directory import score_table, scores_json

    if args.json:
        print(json.dumps({"step": trained.step, "other_data": other, **scores_json(scores)}, allow_nan=False))
        return
    where = "one device" if len(trained.devices) == 1 else f"{len(trained.devices)} devices"
    data_remark = " of other data than it was trained on" if other else ""
    if other is None:
        data_remark = " of data that it may have been trained on: the checkpoint does not say"
    print(
        f"step {trained.step}, {where}, {len(batches)} held-out batches of {args.batch} × {trained.config.data.seq_len}"
        f"{data_remark}"
    )
    print(score_table(scores, trained.model.loss_unit))


def configure_generate(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_flags(parser)
    _add_devices_flag(parser)
    parser.add_argument("--prompt", default="def ", help="text to continue (default: 'def ')")
    add_value(parser, "--tokens", "N", whole_number("tokens", 10**6), "tokens to add", 200)
    add_value(
        parser,
        "--temperature",
        "T",
        amount("temperature", most=100),
        "temperature of sampling; 0: argmax",
        0.8,
    )
    top_k, seed = whole_number("tokens", _MOST - 1, least=0), whole_number("as a seed", _MOST - 1, least=0)
    add_value(parser, "--top-k", "K", top_k, "sample among the K likeliest tokens; 0: all", 0)
    add_value(parser, "--seed", "N", seed, "seed of sampling", 0)


def run_generate(args: argparse.Namespace) -> None:
    from jaxpipe.train.devices import device_errors, request_devices

    request_devices(args.devices or 1)
    from jaxpipe.train.evaluate import generate

    trained = _load(args)
    for remark in trained.tokenizer.remarks:
        notice(remark)
    pieces = generate(trained, args.prompt, args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    print(args.prompt, end="", flush=True)
    with device_errors("generate"):
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


def configure_profile(parser: argparse.ArgumentParser) -> None:
    _configure_config(parser)
    repeats, warm_up = whole_number("repeats", 1000), whole_number("warm-up calls", 1000, least=0)
    add_value(parser, "--repeats", "N", repeats, "timed samples per function; the median counts", 5)
    add_value(parser, "--warm-up", "N", warm_up, "untimed calls before the samples, after the one that compiles", 1)
    add_switch(parser, "--no-host-link", "don't measure copies to pinned host memory and back")
    add_costs_flag(parser)
    add_value(parser, "--details", "FILE", str, "write all measurements as JSON: quartiles, memory, host link")
    add_json_flag(parser, "print the cost profile as JSON")


def run_profile(args: argparse.Namespace) -> None:
    from jaxpipe.train.config import load_config

    config = load_config(args.config, with_parallel_flags(args, args.overrides))
    check_output(args.output, (".json",))
    check_output(args.details, (".json",), "--details")
    from jaxpipe.train.devices import device_errors, find_devices, request_devices

    request_devices(max(config.pipeline.num_devices, config.run.machine.devices), config.run.machine.platform)
    from jaxpipe.cost import measure_host_link, measure_stages
    from jaxpipe.schedule import write_costs
    from jaxpipe.schedule.json_form import to_costs
    from jaxpipe.stage.compiled.recompute_report import policy_tables
    from jaxpipe.train.import_export import completed
    from jaxpipe.train.run.run_directory import measurement_json, measurement_table
    from jaxpipe.train.setup import compile_pipeline, prepare, step_over

    progress = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    pipe = config.pipeline
    devices = find_devices(pipe.num_devices, config.run.machine.platform, tp=pipe.tp, cp=pipe.cp)
    config = completed(config)
    pipeline = compile_pipeline(prepare(config), devices, progress)
    progress("timing each stage alone")
    with device_errors("profile"):
        measured = measure_stages(
            pipeline.stages, repeats=args.repeats, warm_up=args.warm_up, vocab_size=pipeline.model.vocab_size
        )
        if not args.no_host_link:
            progress("timing copies to the host and back")
            measured = replace(measured, host=measure_host_link(devices, repeats=args.repeats))
        step = step_over(config, pipeline.with_costs(measured.costs()))
        costs = step.with_state(step.pipeline.costs)
        progress(f"{step.memory_report()}")
    progress(policy_tables(pipeline.compare_policies()))
    if args.output:
        write_costs(costs, args.output)
    if args.details:
        Path(args.details).write_text(json.dumps(measurement_json(measured), indent=1) + "\n", encoding="utf-8")
    print(json.dumps(to_costs(costs)) if args.json else measurement_table(measured))
