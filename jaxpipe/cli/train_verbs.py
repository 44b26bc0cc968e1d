"""Run the verbs about models and their data: ``train eval generate profile``, ``launch``, ``data``, ``import`` and ``export``.

``launch`` starts the processes of ``train`` here, or writes the file that starts them on a cluster; ``data`` builds and
checks token stores; ``import`` and ``export`` read and write folders of the Hugging Face hub. JAX is imported once flags have
been read.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxpipe import dump
from jaxpipe.axes import RankMesh
from jaxpipe.cli import explained, flags
from jaxpipe.cli.plan_verbs import without_devices
from jaxpipe.cli.registry import parsed
from jaxpipe.errors import EXIT_CODES, INTERRUPTED, STOPPED, AgreedError, ConfigError, JaxpipeError, short_message
from jaxpipe.files import check_local, write_atomically
from jaxpipe.launch import SAID, ClusterJob, Launch, follow_launcher, jobset, sbatch
from jaxpipe.runtime.peers import find_peers
from jaxpipe.runtime.processes import Processes, ProcessGroup, SingleProcess, divided, grid_columns
from jaxpipe.text import closest, format_count
from jaxpipe.train.config import TrainConfig, explain_settings, load_config
from jaxpipe.train.devices import device_errors, find_devices, memory_fraction, request_devices, request_gpus
from jaxpipe.train.run.agreement import agree_on_settings
from jaxpipe.train.run.ending import EndingEarly

if TYPE_CHECKING:
    from jaxpipe.train.corpora.store import Store
    from jaxpipe.train.evaluate import Trained


_MOST = 10**9
_MOST_PROCESSES = 65536
_LESS_HERE = "more --devices, a smaller --batch, or a larger part of the memory (XLA_CLIENT_MEM_FRACTION)"


def _configure_config(parser: argparse.ArgumentParser, *, fills: bool = False) -> None:
    flags.add_value(parser, "--config", "FILE", str, "TOML or JSON settings; without it the defaults")
    text = "settings that override the file, such as run.steps=200"
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help=text)
    flags.add_parallel_flags(parser, fills=fills)


def configure_train(parser: argparse.ArgumentParser) -> None:
    _configure_config(parser, fills=True)
    flags.add_switch(parser, "--print-config", "print all settings (changed ones marked *) and stop")
    flags.add_switch(parser, "--help-config", "explain all settings and stop")
    text = "where devices have no pinned host memory, offload to ordinary host arrays, slowly (offload.fallback=true)"
    flags.add_switch(parser, "--offload-fallback", text)
    flags.add_json_flag(parser, "print the result as JSON on stdout, progress on stderr")
    group = parser.add_argument_group("several processes", "found in the variables of a launcher, too (jaxpipe launch)")
    flags.add_value(group, "--coordinator", "HOST:PORT", str, "address of process 0; the same for all processes")
    count = flags.whole_number("processes", _MOST_PROCESSES)
    flags.add_value(group, "--processes", "N", count, "number of processes (default: one)")
    which = flags.whole_number("as a process", _MOST_PROCESSES - 1, least=0)
    flags.add_value(group, "--process", "K", which, "index of this process, from 0")
    flags.add_value(
        group, "--join-wait", "S", flags.amount("seconds", zero=False), "seconds to wait for other processes", 300.0
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "exit codes:\n" + "\n".join(f"  {code:<3}  {meaning}" for code, meaning in EXIT_CODES.items())


def config_of(args: argparse.Namespace) -> TrainConfig:
    """Build the config from the flags of ``train``."""
    overrides = flags.with_parallel_flags(args, args.overrides)
    if args.offload_fallback:
        overrides.append("offload.fallback=true")
    if args.dp == flags.AUTO and args.ep:
        # Until the devices are counted: at least as many as the settings say, and a number that ep divides.
        dp = load_config(args.config, args.overrides).pipeline.dp
        overrides.append(f"pipeline.dp={-(-dp // args.ep) * args.ep}")
    return load_config(args.config, overrides)


def run_train(args: argparse.Namespace) -> int:
    if args.help_config:
        print(explain_settings())
        return 0
    if args.print_config:
        print(config_of(args).describe())
        return 0
    with ExitStack() as stack:
        processes: Processes = SingleProcess()
        # a signal before the first step must end all processes, those included that are still waiting to connect; the
        # lambda reads ``processes`` late, as it is replaced below
        with EndingEarly(lambda how, code: processes.end(how, code)):
            follow_launcher()
            if peers := find_peers((args.coordinator, args.processes, args.process)):
                processes = ProcessGroup(peers, args.join_wait)
                dump.own_folder(peers.mine)
            stack.enter_context(ending_together(processes))
            # only now: a config that is wrong for one process must end the others, too, not leave them waiting
            config = config_of(args)
            agree_on_settings(processes, config, {"--dp": str(args.dp)})
            pipe, columns = config.pipeline, config.run.machine.columns
            processes.arrange(pipe.ranks, None if args.dp == flags.AUTO else pipe.mesh, columns)
            devices = max(pipe.num_devices, config.run.machine.devices)
            if processes.number > 1:
                local_ranks = processes.ranks(pipe.ranks)[processes.mine]
                least = pipe.mesh.one_row.num_devices if args.dp == flags.AUTO else 1
                devices = len(local_ranks) * max(pipe.mesh.num_devices // processes.columns, least)
            # this order: JAX reads its flags when it is imported, and connects processes before it first looks for devices
            request_devices(devices, config.run.machine.platform, processes=processes.number)
            request_gpus(config.run, processes=processes.number, mine=processes.mine)
            processes.start_jax()
            if args.dp == flags.AUTO:
                config = _filling_all_devices(config, processes)
                processes.arrange(pipe.ranks, config.pipeline.mesh, columns)
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


def _filling_all_devices(config: TrainConfig, processes: Processes) -> TrainConfig:
    """Return the config with ``--dp auto`` replaced by the number that all devices of all processes make."""
    import jax

    count = jax.device_count()
    filled = processes.run_on_all("--dp auto", lambda: config.filling(count))
    if processes.mine == 0:
        pipe = filled.pipeline
        flags.notice(f"--dp auto: {count} devices make dp {pipe.dp}, with {pipe.microbatches} microbatches")
    return filled


@contextmanager
def ending_together(processes: Processes) -> Iterator[None]:
    """End all processes with one line and exit code when one of them fails inside the block; a process that succeeds waits
    for the others."""
    try:
        yield
    except AgreedError:
        # all processes raise it together, so nobody has to be told
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
    flags.add_value(
        parser, "--step", "N", _step, "the checkpoint of step N, or 'best' (lowest loss); the newest by default"
    )
    text = (
        "what makes the model, needed where the checkpoint names code outside of models, which runs only if you name it"
    )
    flags.add_value(parser, "--model", "MODULE:FUNCTION", str, text)
    flags.add_switch(parser, "--other-model", "accept a model whose computation has changed since the checkpoint")
    text = (
        "byte, a tokenizer.json or ids:N, where the checkpoint has no tokenizer, as those of Trainer.save without one"
    )
    flags.add_value(parser, "--tokenizer", "SPEC", str, text)


def _add_devices_flag(parser: argparse.ArgumentParser) -> None:
    many = "devices to put the layers on, emulated on a CPU; by default as few as hold them"
    flags.add_value(parser, "--devices", "N", flags.whole_number("devices", 512), many)


def _load(args: argparse.Namespace) -> Trained:
    """Load the model that the flags name; report unknown config keys on stderr."""
    from jaxpipe.train.devices import limit_line
    from jaxpipe.train.evaluate import load_trained

    with device_errors("loading", use=_LESS_HERE):
        names = ("step", "model", "tokenizer", "devices", "other_model")
        trained = load_trained(args.checkpoint, **{name: getattr(args, name) for name in names})
    if line := limit_line(trained.devices[0]):
        flags.notice(line)
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
    flags.add_value(parser, "--batch", "N", flags.whole_number("sequences", 65536), "sequences per batch", 16)
    flags.add_value(parser, "--batches", "N", flags.whole_number("batches", _MOST), "at most N batches; all by default")
    flags.add_switch(parser, "--baselines", "also score unigram and bigram models of the same text")
    flags.add_switch(parser, "--other-data", "evaluate on data other than those the model was trained on")
    flags.add_value(
        parser, "--data", "PATH", str, "data.path in place of the run's; a module:function must be named so"
    )
    flags.add_json_flag(parser, "print JSON")


def run_eval(args: argparse.Namespace) -> None:
    request_devices(args.devices or 1)
    from jaxpipe.train.corpora import ngram
    from jaxpipe.train.corpora.datasets import data_remarks
    from jaxpipe.train.evaluate import held_out_score, load_data

    trained = _load(args)
    dataset, other = load_data(trained, other=args.other_data, path=args.data)
    for remark in data_remarks(dataset):
        flags.notice(remark)
    batches = dataset.held_out_batches(args.batch, trained.config.data.seq_len, args.batches)
    scores: dict[str, Any] = dict(ngram.baselines(dataset, batches)) if args.baselines else {}
    with device_errors("eval", use=_LESS_HERE):
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
    flags.add_value(parser, "--tokens", "N", flags.whole_number("tokens", 10**6), "tokens to add", 200)
    flags.add_value(
        parser,
        "--temperature",
        "T",
        flags.amount("temperature", most=100),
        "temperature of sampling; 0: argmax",
        0.8,
    )
    top_k, seed = flags.whole_number("tokens", _MOST - 1, least=0), flags.whole_number("as a seed", _MOST - 1, least=0)
    flags.add_value(parser, "--top-k", "K", top_k, "sample among the K likeliest tokens; 0: all", 0)
    flags.add_value(parser, "--seed", "N", seed, "seed of sampling", 0)


def run_generate(args: argparse.Namespace) -> None:
    request_devices(args.devices or 1)
    from jaxpipe.train.evaluate import generate

    trained = _load(args)
    for remark in trained.tokenizer.remarks:
        flags.notice(remark)
    pieces = generate(trained, args.prompt, args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed)
    print(args.prompt, end="", flush=True)
    with device_errors("generate", use=_LESS_HERE):
        for piece in pieces:
            print(piece, end="", flush=True)
    print()


def configure_profile(parser: argparse.ArgumentParser) -> None:
    _configure_config(parser)
    repeats, warm_up = flags.whole_number("repeats", 1000), flags.whole_number("warm-up calls", 1000, least=0)
    flags.add_value(parser, "--repeats", "N", repeats, "timed samples per function; the median counts", 5)
    flags.add_value(
        parser, "--warm-up", "N", warm_up, "untimed calls before the samples, after the one that compiles", 1
    )
    flags.add_switch(parser, "--no-host-link", "don't measure copies to pinned host memory and back")
    flags.add_costs_flag(parser)
    flags.add_value(parser, "--details", "FILE", str, "write all measurements as JSON: quartiles, memory, host link")
    flags.add_json_flag(parser, "print the cost profile as JSON")


def run_profile(args: argparse.Namespace) -> None:
    config = load_config(args.config, flags.with_parallel_flags(args, args.overrides))
    flags.check_output(args.output, (".json",))
    flags.check_output(args.details, (".json",), "--details")
    request_devices(max(config.pipeline.num_devices, config.run.machine.devices), config.run.machine.platform)
    request_gpus(config.run)
    from jaxpipe.cost.profile import measure_host_link, measure_stages
    from jaxpipe.schedule import write_costs
    from jaxpipe.schedule.files import to_costs
    from jaxpipe.stage.compiled.recompute_report import policy_tables
    from jaxpipe.train.import_export import completed
    from jaxpipe.train.run.run_directory import measurement_json, measurement_table
    from jaxpipe.train.setup import compile_pipeline, prepare, step_over

    progress = partial(print, file=sys.stderr if args.json else sys.stdout, flush=True)
    pipe = config.pipeline
    devices = find_devices(pipe.num_devices, config.run.machine.platform, pipe.mesh)
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


_FLAGS = {
    "local": ("number", "max_restarts", "logs"),
    "slurm": ("output", "nodes", "gpus", "per_node", "max_restarts", "name", "target", "unchecked", "sbatch"),
    "k8s": ("output", "nodes", "gpus", "max_restarts", "name", "target", "unchecked", "image", "claim"),
}
"""Flags that each place takes."""
_NEEDED = {
    "local": ("number",),
    "slurm": ("output", "nodes", "gpus"),
    "k8s": ("output", "nodes", "gpus", "image", "claim"),
}


def configure_launch(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxpipe launch local|slurm|k8s FLAGS -- train …"
    parser.add_argument(
        "where", choices=list(_FLAGS), help="start processes here, or write a file for sbatch or kubectl"
    )
    text = "restart the run up to N times after it is lost"
    flags.add_value(parser, "--max-restarts", "N", flags.whole_number("restarts", 10**6, least=0), text)
    local_flags = parser.add_argument_group("local")
    flags.add_value(local_flags, "-n", "N", flags.whole_number("processes", 4096), "number of processes", dest="number")
    flags.add_value(local_flags, "--logs", "DIR", str, "log folder (default: temporary, removed on success)")
    cluster = parser.add_argument_group("slurm, k8s")
    flags.add_value(cluster, "-o", "FILE", str, "the file to write", dest="output")
    flags.add_value(cluster, "--nodes", "N", flags.whole_number("nodes", 65536), "number of hosts")
    flags.add_value(cluster, "--gpus-per-node", "N", flags.whole_number("GPUs", 4096), "GPUs per node", dest="gpus")
    flags.add_value(cluster, "--name", "NAME", str, "job name (default: jaxpipe)")
    text = "the nodes' GPUs, such as h100: refuse a run that needs more memory than they have (as jaxpipe plan)"
    flags.add_value(cluster, "--target", "NAME", str, text)
    text = "do not build, cut and trace the model first, which needs its code, tokenizer and run.init_from here"
    flags.add_switch(cluster, "--unchecked", text)
    per = flags.whole_number("processes", 4096)
    flags.add_value(
        cluster, "--processes-per-node", "N", per, "slurm: processes per node (default: one)", dest="per_node"
    )
    flags.add_repeated(
        cluster, "--sbatch", "OPTION=VALUE", "slurm: option such as time=12:00:00 (repeatable)", default=None
    )
    flags.add_value(cluster, "--image", "IMAGE", str, "k8s: container image with jaxpipe installed")
    flags.add_value(cluster, "--claim", "NAME:PATH", str, "k8s: volume claim that all pods share, and its mount path")


def run_launch(args: argparse.Namespace) -> int:
    for flag in sorted({flag for names in _FLAGS.values() for flag in names} - set(_FLAGS[args.where])):
        if getattr(args, flag) not in (None, False):
            raise ConfigError(
                f"{_FLAG_NAMES[flag]} is not a flag of 'jaxpipe launch {args.where}' (see 'jaxpipe launch --help')"
            )
    if missing := [_FLAG_NAMES[flag] for flag in _NEEDED[args.where] if getattr(args, flag) is None]:
        raise ConfigError(f"jaxpipe launch {args.where} needs {', '.join(missing)} (see 'jaxpipe launch --help')")
    if args.rest[:1] != ["train"]:
        raise ConfigError(
            "give the command to launch after --, such as: jaxpipe launch local -n 2 -- train --config run.toml"
        )

    # the command is parsed here as it will be there: a mistake shows before a job waits hours for its nodes
    train_args = parsed("train", args.rest[1:])
    config = config_of(train_args)
    is_auto = train_args.dp == flags.AUTO
    if args.where == "local":
        return _launch_here(args, config, None if is_auto else config.pipeline.mesh)
    return _write_job_file(args, config.filling(args.nodes * args.gpus) if is_auto else config)


_FLAG_NAMES = {"number": "-n", "output": "-o", "gpus": "--gpus-per-node", "per_node": "--processes-per-node"} | {
    flag: f"--{flag.replace('_', '-')}"
    for flag in ("max_restarts", "logs", "nodes", "name", "target", "unchecked", "sbatch", "image", "claim")
}


def _launch_here(args: argparse.Namespace, config: TrainConfig, mesh: RankMesh | None) -> int:
    ranks = config.pipeline.ranks
    divided(ranks, args.number // grid_columns(args.number, ranks, mesh, config.run.machine.columns))
    check_local(args.logs or "", "--logs")
    logs = Path(args.logs or tempfile.mkdtemp(prefix="jaxpipe-launch-"))
    logs.mkdir(parents=True, exist_ok=True)
    with Launch([sys.executable, "-m", "jaxpipe", *args.rest], args.number, logs) as launch:
        code = launch.run(args.max_restarts or 0)
    if args.logs is None and code in SAID:
        shutil.rmtree(logs, ignore_errors=True)
    return code


def _write_job_file(args: argparse.Namespace, config: TrainConfig) -> int:
    name, restarts = args.name or "jaxpipe", args.max_restarts or 0
    job = ClusterJob(name, config, args.rest, args.nodes, args.gpus, args.per_node or 1, restarts)
    if not args.unchecked:
        _require_start(config, args.target)
    if args.where == "slurm":
        text, start = sbatch(job, args.sbatch or (), Path.cwd()), "sbatch"
    else:
        text, start = jobset(job, args.image, args.claim), "kubectl apply -f"
    write_atomically(Path(args.output), text)
    print(f"{job.summary}; start it with: {start} {shlex.quote(args.output)}")
    return 0


def _require_start(config: TrainConfig, target_name: str | None) -> None:
    """Build, cut and trace the model as every process of the job will do. Compiles nothing and reads no data.

    Raises:
        ConfigError: the run can't start, or needs more memory than devices of the target have.
    """
    without_devices()
    from jaxpipe.planning.predict import predict
    from jaxpipe.planning.roofline import Efficiency
    from jaxpipe.planning.stages import stage_costs_of
    from jaxpipe.planning.targets import find_target
    from jaxpipe.train.import_export import completed

    target = find_target(target_name or "h100")
    efficiency = Efficiency(memory=memory_fraction(config.run.machine.memory_fraction))
    limit = target.memory_bytes * efficiency.memory
    try:
        config = completed(config)
        prediction = predict(config, stage_costs_of(config, target, efficiency, lambda line: None), limit)
    except JaxpipeError as error:
        raise ConfigError(f"the job could not start: {error}; --unchecked writes its file all the same") from error
    if target_name is not None and not prediction.fits:
        raise ConfigError(
            f"rank {prediction.worst.rank} needs {prediction.worst.peak_bytes / 1e9:.4g} GB a device and JAX gets "
            f"{limit / 1e9:.4g} GB on {target.name}; see jaxpipe plan --target {target.name}, which suggests what fits"
        )


ACTIONS = ("build", "check")


def configure_data(parser: argparse.ArgumentParser) -> None:
    text = (
        "'build' tokenises sources into a store, or goes on with one that was begun; 'check' compares all its checksums"
    )
    parser.add_argument("action", metavar="ACTION", help=text)
    text = "build: files and folders of JSONL, Parquet and text; check: stores"
    parser.add_argument("paths", metavar="PATH", nargs="+", help=text)
    flags.add_value(parser, "-o --output", "STORE", str, "build: the folder to create")
    flags.add_value(parser, "--tokenizer", "NAME", str, "as data.tokenizer", "byte")
    flags.add_value(parser, "--chat-template", "FILE", str, "as data.chat_template", "auto")
    flags.add_value(parser, "--chat-date", "DATE", str, "as data.chat_date", "auto")
    flags.add_value(parser, "--field", "NAME", str, "as data.field", "auto")
    flags.add_value(
        parser, "--eos", "TOKEN", str, "as data.eos; with tokenizer byte, text files end with 0, too", "auto"
    )
    flags.add_value(parser, "--bos", "TOKEN", str, "as data.bos", "auto")
    flags.add_value(parser, "--suffixes", "LIST", str, "as data.suffixes, joined by commas")
    text = "processes that tokenise; by default one a core"
    flags.add_value(parser, "--workers", "N", flags.whole_number("processes", 1024), text)
    flags.add_switch(parser, "--chat", "short for --format chat: records are chats")
    parser.add_argument("--format", choices=("auto", "text", "chat"), help="as data.format (default auto)")
    flags.add_json_flag(parser)


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
        stores = [_build_store(arguments, paths)]
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
        flags.print_json({"stores": store_records, "seconds": seconds})
        return
    for each in store_records:
        print(f"{each['store']}: {each['documents']:,} documents, {each['tokens']:,} tokens, intact ({seconds:.1f} s)")


def _build_store(arguments: argparse.Namespace, sources: list[Path]) -> Store:
    # before the package is imported: our worker processes run side by side, and its threads would fight for their cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
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
    return build_store(sources, Path(arguments.output), tokenizer, reading, workers=workers, note=flags.notice)


def configure_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="HF_DIR", help="folder of the hub: config.json, safetensors, tokenizer.json")
    flags.add_value(parser, "-o --output", "RUN", str, "the run directory to create, at step 0", required=True)
    flags.add_value(
        parser, "--model", "MODULE:FUNCTION", str, "the model that reads it; by default the one of its model_type"
    )
    length = flags.whole_number("tokens", 2**31 - 1)
    flags.add_value(parser, "--seq-len", "T", length, "data.seq_len of the run; by default the model's, at most 1024")


def run_import(args: argparse.Namespace) -> None:
    without_devices()
    from jaxpipe.train.import_export import import_hub

    imported = import_hub(Path(args.folder), Path(args.output), target=args.model, seq_len=args.seq_len)
    for remark in imported.remarks:
        flags.notice(remark)
    print(
        f"{imported.config.model.target}, {format_count(imported.parameters)} parameters, in {imported.path} at step 0"
    )
    print(f"evaluate it with: jaxpipe eval {imported.path} --other-data --data PATH")
    print(f"train it with: jaxpipe train --config {imported.path / 'config.toml'} data.path=PATH")


def configure_export(parser: argparse.ArgumentParser) -> None:
    add_checkpoint_flags(parser)
    flags.add_value(parser, "-o --output", "DIR", str, "the folder to create", required=True)
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument(
        "--dtype", choices=dtypes, default="float32", help="dtype of the written tensors (default float32)"
    )
    size = flags.amount("gigabytes", zero=False)
    flags.add_value(parser, "--shard-size", "GB", size, "largest size of a file in gigabytes (10⁹ bytes)", 5.0)


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
