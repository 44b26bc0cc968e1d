"""Experiments that need no JAX: what they do to the process that they run in is what ``scripts/gpu_truth.py`` must survive."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from scripts import gpu_truth
from scripts.gpu_experiments.registry import Experiment, Settings

CEILINGS = {"noise_300_flops_per_s": 2.0}


def measure_card(settings: Settings) -> dict[str, Any]:
    return {"device": "none", "ceilings": CEILINGS, "memory": {}, "versions": {"python": sys.version}}


def quick(settings: Settings) -> dict[str, Any]:
    return {"ratio": 0.5, "deep": {"seconds": float("nan")}, "ceilings": dict(settings.ceilings)}


def crash(settings: Settings) -> dict[str, Any]:
    print("about to fall", flush=True)
    os.abort()


def hang(settings: Settings) -> dict[str, Any]:
    print("waiting", flush=True)
    time.sleep(600)
    return {}


def composed(settings: Settings) -> dict[str, Any]:
    rates = {"tokens_per_s_per_gpu": 1200.0, "flops_per_s_per_gpu": 400e12}
    return {
        "peer": {"what": "theirs", "tokens_per_s_per_gpu": 1602, "flops_per_s_per_gpu": 719e12},
        "64 of them": {**rates, "schedule": "zb-h1", "recompute": "full", "bubble": 0.25},
    }


def absent(settings: Settings) -> dict[str, Any]:
    return {"note": "torch is missing"}


def fake(name: str, run: Callable[[Settings], Mapping[str, Any]], estimate_s: float = 20) -> Experiment:
    return Experiment(
        id=name,
        run=run,
        version=1,
        question=f"what does {name} do?",
        backs="tests",
        paths=("tests/support/paths.py",),
        estimate_s=estimate_s,
        predicted={"ratio": "0.5"},
        want={"ratio": "<= 0.6", "deep.seconds": "== 0"},
    )


def main() -> int:
    """Run one that ends and one that does not."""
    gpu_truth.measure_card = measure_card  # type: ignore[assignment]
    gpu_truth.ForkServer = lambda environment: None  # type: ignore[assignment,misc]
    return gpu_truth.main(["--tiny"], [fake("A", quick), fake("B", hang, 600)])
