"""Ask a GPU the questions whose answers jaxpipe's claims rest on, those that tell most per minute first.

    python scripts/gpu_truth.py                        # what is missing for this card, within 540 s
    python scripts/gpu_truth.py --only T1 T3 --out DIR # these; DIR/truth-CARD.json holds all results
    python scripts/gpu_truth.py --merge FILE…          # put what other calls wrote into scripts/results/gpu/
    python scripts/gpu_truth.py --tiny                 # every experiment at toy size on a CPU: tests them, measures nothing
    python scripts/gpu_truth.py --list

Experiments (``scripts/gpu_experiments/``) run one after another, each in a process of its own that is killed at twice its
estimate; what crashes or hangs is recorded as failed with what it said, and costs only itself. One starts only if its estimate
fits what is left of the budget. After each, its JSON is written to ``DIR/CARD/ID.json``, to ``DIR/truth-CARD.json`` with all
others, and to ``.gpu-truth/`` in the working directory, which git ignores and which also keeps logs, compiled programs and
autotuning results: so the next call goes on where this one ended, however it ended.

*Done* is an experiment whose version and digest (of the files that it exercises) have a result for this card; commits do not
matter. First come those that no card has measured, then those whose files changed, then those that another card has measured.
What failed, or could not be asked here, is asked again only by ``--only`` or ``--again``.

Each call that measures begins with the card's ceilings (:mod:`scripts.gpu_experiments.card`) and ends with the sustained
product again; if that differs by more than 3%, results of the call carry ``drift``. Exit codes: 0, 1 if an experiment failed, 2
for what cannot be asked.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from jaxpipe.files import write_atomically
from scripts.gpu_experiments.card import ClockSampler, card_name, driver, measure_card, measure_noise_product
from scripts.gpu_experiments.process import ForkServer, call_in_process
from scripts.gpu_experiments.registry import ROOT, TINY, Experiment, Settings, all_experiments, checks_of
from scripts.provenance import commit_id

RESULTS = ROOT / "scripts" / "results" / "gpu"
KEPT = Path(".gpu-truth")
TINY_CARD = "tiny"
_MOST_DRIFT = 0.03
_PREAMBLE_S, _POSTAMBLE_S = 120, 20
_TINY_LIMIT_S, _TINY_ESTIMATE_S = 120, 5
_FAST_COMPILES = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
)


class UsageError(Exception):
    """Something that cannot be asked, in one line."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def main(argv: Sequence[str] | None = None, experiments: Sequence[Experiment] | None = None) -> int:
    """Run the command; ``experiments`` in place of all that there are."""
    parser = _Parser(prog="gpu_truth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=_seconds, default=540.0, help="seconds of this call (default 540)")
    parser.add_argument("--only", nargs="+", metavar="ID", help="only these experiments")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU")
    parser.add_argument(
        "--list", action="store_true", help="list the experiments, and what is done of them on this card"
    )
    parser.add_argument("--merge", nargs="+", metavar="FILE", type=Path, help="take in truth-CARD.json of other calls")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of results (default scripts/results/gpu)")
    parser.add_argument("--again", action="store_true", help="measure also what is done")
    try:
        args = parser.parse_args(argv)
        return _run(args, all_experiments() if experiments is None else experiments)
    except UsageError as error:
        print(f"gpu_truth: {error}", file=sys.stderr)
        return 2


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return seconds


def _run(args: argparse.Namespace, experiments: Sequence[Experiment]) -> int:
    ids = [e.id for e in experiments]
    if unknown := sorted(set(args.only or ()) - set(ids)):
        raise UsageError(f"there is no experiment {', '.join(unknown)}; there are {', '.join(ids)}")
    out = args.out or (KEPT if args.tiny else RESULTS)
    store = ResultStore(list(dict.fromkeys([KEPT, out])))
    if args.merge:
        count = store.merge(args.merge)
        print(f"{count} results of {len(args.merge)} files are in {out}")
        return 0
    card = TINY_CARD if args.tiny else card_name()
    if args.list:
        print(_listing(experiments, store, card))
        return 0
    if card is None:
        raise UsageError("no GPU is seen here (by NVML or nvidia-smi); run it where there is one, or with --tiny")
    chosen = [e for e in experiments if args.only is None or e.id in args.only]
    retried = set(ids if args.again else args.only or ())
    pending = store.pending(chosen, card, retried, again=args.again)
    if not pending:
        print(f"nothing to measure: {len(chosen)} of {len(chosen)} experiments have results for {card}")
        return 0
    return Call(args, store, card).run(pending)


class Call:
    """One call of the command: a preamble, experiments while the budget lasts, a postamble."""

    def __init__(self, args: argparse.Namespace, store: ResultStore, card: str) -> None:
        self.args, self.store, self.card = args, store, card
        self.ends = time.monotonic() + args.budget
        self.settings = TINY if args.tiny else Settings()
        self.environment = _environment(card, args.tiny)
        self.card_now: dict[str, Any] = {}
        self.server = ForkServer(self.environment) if args.tiny else None
        self.results: list[dict[str, Any]] = []

    def run(self, pending: Sequence[Experiment]) -> int:
        preamble = call_in_process(
            measure_card,
            self.settings,
            limit_s=_PREAMBLE_S,
            environment=self.environment,
            log=self._log("preamble"),
            server=self.server,
        )
        if preamble.failure:
            raise UsageError(f"the card can't be measured: it {preamble.failure}: {_last_line(preamble.output)}")
        self.card_now = preamble.answer
        self.settings = replace(self.settings, ceilings=preamble.answer["ceilings"])
        print(f"{self.card}: {_ceilings_line(self.settings.ceilings)}", flush=True)
        # Toy sizes tell no times, so experiments may share the cores.
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1) if self.args.tiny else 1) as pool:
            for _ in pool.map(self._ask, pending):
                pass
        if self.server is not None:
            self.server.close()
        self._postamble()
        if not self.args.tiny:
            _copy_autotuning(self.card, self.store.folders[-1])
        return int(any(r["status"] == "failed" for r in self.results))

    def _ask(self, experiment: Experiment) -> None:
        """Run ``experiment`` if its estimate fits what is left, and write its result."""
        estimate_s = min(experiment.estimate_s, _TINY_ESTIMATE_S) if self.args.tiny else experiment.estimate_s
        left_s = self.ends - time.monotonic() - _POSTAMBLE_S
        if estimate_s > left_s:
            print(
                f"{experiment.id}: not begun, takes about {estimate_s:.0f} s of {max(0, left_s):.0f} left", flush=True
            )
            return
        result = self._begun(experiment)
        self.store.begin(result)
        limit_s = min(2 * experiment.estimate_s, _TINY_LIMIT_S if self.args.tiny else math.inf)
        began = time.monotonic()
        with ClockSampler() as clocks:
            outcome = call_in_process(
                experiment.run,
                self.settings,
                limit_s=limit_s,
                environment={**self.environment, **experiment.environment},
                log=self._log(experiment.id),
                server=self.server,
            )
        result |= {"seconds": round(time.monotonic() - began, 3), "clocks": clocks.summary()}
        if outcome.failure:
            result |= {"status": "failed", "note": outcome.failure, "said": outcome.output}
        else:
            numbers = dict(outcome.answer)
            note = numbers.pop("note", "")
            checks = checks_of(experiment.want, numbers)
            status = "done" if numbers else "skipped"
            result |= {"status": status, "note": note, "numbers": numbers, "checks": checks}
        self.results.append(result)
        self.store.write(result)
        print(_line(result), flush=True)

    def _begun(self, experiment: Experiment) -> dict[str, Any]:
        """Return what is known of a result before the experiment runs, its prediction among it."""
        return {
            "id": experiment.id,
            "version": experiment.version,
            "digest": experiment.digest,
            "question": experiment.question,
            "backs": experiment.backs,
            "card": self.card,
            "driver": driver(),
            "ceilings": self.card_now["ceilings"],
            "memory": self.card_now["memory"],
            "commit": commit_id(ROOT),
            "versions": self.card_now["versions"],
            "flags": self.environment.get("XLA_FLAGS", ""),
            "command": " ".join(["python", *sys.argv]),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "predicted": dict(experiment.predicted),
            "status": "running",
        }

    def _postamble(self) -> None:
        """Measure the sustained product again, and mark all results of this call if the card has drifted."""
        if not self.results or self.args.tiny:
            return
        after = call_in_process(measure_noise_product, self.settings, limit_s=_PREAMBLE_S, environment=self.environment)
        before = self.settings.ceilings["noise_300_flops_per_s"]
        drift = after.answer / before - 1 if after.answer else None
        if drift is not None and abs(drift) <= _MOST_DRIFT:
            return
        for result in self.results:
            self.store.write(result | {"drift": drift})
        print(f"the sustained product has drifted by {'?' if drift is None else f'{drift:+.1%}'}")

    def _log(self, name: str) -> Path:
        folder = KEPT / slug(self.card)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.log"


class ResultStore:
    """Keeps results by card and experiment, in each of some folders alike: ``CARD/ID.json``, and ``truth-CARD.json`` with all.

    Raises:
        UsageError: a folder can't be written, or a file in it is no result.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._results: dict[tuple[str, str], dict[str, Any]] = {}
        self._lock = threading.Lock()
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / ".writable").write_bytes(b"")
                (folder / ".writable").unlink()
            except OSError as error:
                raise UsageError(f"{folder} can't be written: {error.strerror}") from None
            for file in sorted(folder.glob("*/*.json")):
                self._take([_read(file)], file)

    def _take(self, results: Iterable[Any], file: Path) -> int:
        """Keep each result unless a newer one is there: how many were kept."""
        count = 0
        for result in results:
            if not isinstance(result, dict) or not {"id", "card", "digest", "status", "started"} <= result.keys():
                raise UsageError(
                    f"{file} is no result of gpu_truth: it lacks an id, a card, a digest, a status or a start"
                )
            at = slug(result["card"]), result["id"]
            if at not in self._results or self._results[at]["started"] < result["started"]:
                self._results[at] = result
                count += 1
        return count

    def merge(self, files: Sequence[Path]) -> int:
        """Take in files with all results of a card: how many were new."""
        count = 0
        for file in files:
            values = _read(file)
            count += self._take(values if isinstance(values, list) else [values], file)
        for result in self._results.values():
            self._write(result)
        return count

    def pending(
        self, experiments: Sequence[Experiment], card: str, retried: set[str], *, again: bool
    ) -> list[Experiment]:
        """Return what is to be measured on ``card``, in the order in which it is."""
        priorities = {e.id: 0 if again else self._priority(e, card, e.id in retried) for e in experiments}
        ranked = sorted(experiments, key=lambda e: priorities[e.id] or 0)
        return [e for e in ranked if priorities[e.id] is not None]

    def _priority(self, experiment: Experiment, card: str, retried: bool) -> int | None:
        """0: no card has measured it; 1: its files have changed since; 2: only another card has; None: nothing to do."""
        results = [r for (_, name), r in self._results.items() if name == experiment.id]
        current = [r for r in results if (r["version"], r["digest"]) == (experiment.version, experiment.digest)]
        for result in current:
            if slug(result["card"]) == slug(card) and (result["status"] == "done" or not retried):
                return None
        if not any(r["status"] == "done" for r in results):
            return 0
        return 2 if any(r["status"] == "done" for r in current) else 1

    def state(self, experiment: Experiment, card: str) -> str:
        """Return what is known of ``experiment`` on ``card``, in a word or two."""
        result = self._results.get((slug(card), experiment.id))
        if result is None:
            return "–"
        is_current = (result["version"], result["digest"]) == (experiment.version, experiment.digest)
        return result["status"] if is_current else f"{result['status']}, files changed"

    def begin(self, result: Mapping[str, Any]) -> None:
        """Write down the prediction, before the experiment runs."""
        folder = self.folders[0] / slug(result["card"])
        folder.mkdir(parents=True, exist_ok=True)
        with self._lock:
            _write(folder / f"{result['id']}.predicted", result)

    def write(self, result: dict[str, Any]) -> None:
        """Keep ``result``; one that failed keeps the last that did not beside it."""
        with self._lock:
            at = slug(result["card"]), result["id"]
            before = self._results.get(at, {})
            if result["status"] != "done" and (
                last := before if before.get("status") == "done" else before.get("last")
            ):
                result["last"] = last
            self._results[at] = result
            self._write(result)

    def _write(self, result: Mapping[str, Any]) -> None:
        card = slug(result["card"])
        of_card = [r for (name, _), r in sorted(self._results.items()) if name == card]
        for folder in self.folders:
            (folder / card).mkdir(exist_ok=True)
            _write(folder / card / f"{result['id']}.json", result)
            _write(folder / f"truth-{card}.json", of_card)


def slug(card: str) -> str:
    """Return the name of a card as a folder's: ``nvidia-h100-80gb-hbm3``."""
    return re.sub(r"[^a-z0-9]+", "-", card.lower()).strip("-")


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{file} is no JSON ({error}): remove it, or measure again") from None


def _write(file: Path, value: Any) -> None:
    write_atomically(file, json.dumps(value, indent=1) + "\n")


def _environment(card: str, tiny: bool) -> dict[str, str]:
    """Return the variables of experiments: compiled programs and autotuning results go from call to call."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    variables = {
        "JAX_COMPILATION_CACHE_DIR": os.environ.get("JAX_COMPILATION_CACHE_DIR", str((KEPT / "cache").resolve())),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    if tiny:
        variables["JAX_PLATFORMS"] = "cpu"
        flags += [flag for flag in _FAST_COMPILES if not any(f.startswith(flag.partition("=")[0]) for f in flags)]
    else:
        autotuned = (KEPT / f"autotune-{slug(card)}.txt").resolve()
        committed = RESULTS / autotuned.name
        if committed.exists() and not autotuned.exists():
            shutil.copy(committed, autotuned)
        if autotuned.exists():
            flags.append(f"--xla_gpu_load_autotune_results_from={autotuned}")
        flags.append(f"--xla_gpu_dump_autotune_results_to={autotuned}")
    return variables | {"XLA_FLAGS": " ".join(flags)}


def _copy_autotuning(card: str, out: Path) -> None:
    autotuned = KEPT / f"autotune-{slug(card)}.txt"
    if autotuned.exists():
        shutil.copy(autotuned, out)


def _listing(experiments: Sequence[Experiment], store: ResultStore, card: str | None) -> str:
    rows = [
        f"{e.id:4} {e.estimate_s:4.0f} s  {store.state(e, card) if card else '–':20} {e.question}" for e in experiments
    ]
    return "\n".join([f"card: {card or 'none seen'}", *rows])


def _line(result: Mapping[str, Any]) -> str:
    head = f"{result['id']}: {result['status']} in {result['seconds']:.1f} s"
    if result["status"] == "failed":
        return f"{head}: it {result['note']}: {_last_line(result['said'])}"
    if result["status"] == "skipped":
        return f"{head}: {result['note']}"
    checks = [f"{c['name']} = {c['value']:.4g} (want {c['want']})" for c in result["checks"] if c["ok"] is not None]
    return "; ".join([head, *checks])


def _last_line(said: str) -> str:
    return next(reversed(said.strip().splitlines()), "it said nothing")


def _ceilings_line(ceilings: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in ceilings.items())


if __name__ == "__main__":
    sys.exit(main())
