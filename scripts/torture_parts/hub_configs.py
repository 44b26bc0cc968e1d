"""R21: ``config.json`` in variants of two to four keys. Each is read as transformers reads it, or refused in a line that names
a key.

What transformers makes of them is recorded (``scripts/hub_configs.py``), so the variants are those of the record, whatever the
seed; a seed adds changes that must be refused or change nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torture_parts.trial import Bench, Case, FailedError, Trial

_WRONG: tuple[Any, ...] = (
    "x",
    [],
    {},
    [[1]],
    {"a": {"b": 1}},
    -1,
    1e400,
    True,
    "\u202e",
    2**70,
    0.5,
    ["full_attention"],
)


def variants(bench: Bench) -> Iterator[Case]:
    """R21."""
    from tests.support.hub_meanings import golden_configs

    for record in golden_configs()["random"][: bench.count(2000, 60)]:
        yield Case("recorded variant", partial(_compare, record=record))
    for record in golden_configs()["random"][: bench.count(2000, 60)]:
        yield Case("value of another kind", partial(_spoil, record=record))


def _compare(trial: Trial, record: dict[str, Any]) -> None:
    from tests.support.hub_meanings import problem

    if difference := problem(record, trial.folder):
        raise FailedError(f"{difference}: {json.dumps(record['config'])}")


def _spoil(trial: Trial, record: dict[str, Any]) -> None:
    """Put a value of another kind in the place of one key; whatever is made of it, nothing but ConfigError may come."""
    from jaxpipe.errors import ConfigError
    from jaxpipe.interop.hub import open_hub

    config = dict(record["config"])
    config[trial.rng.choice(sorted(config))] = trial.rng.choice(_WRONG)
    Path(trial.folder, "config.json").write_text(json.dumps(config))
    try:
        hub = open_hub(trial.folder)
        hub.exchange.tensors({"seq_len": 8, **hub.options})
    except ConfigError as error:
        if "\n" in str(error) or len(str(error)) > 600:
            raise FailedError(f"not one line: {error}: {json.dumps(config)}") from error
