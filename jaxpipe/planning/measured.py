"""Measure seconds of stage functions on local devices, kept in a file and reused (FlexPipe, section 3, "profiling").

A time is found again by what was run: the programs of F, B, W and BW, the devices and the version of JAX. Tensor-parallel
collectives are taken off, as the target's links say what they take.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.cost import measure_stages
from jaxpipe.errors import ConfigError, StageError
from jaxpipe.files import write_atomically
from jaxpipe.mesh import AXES, TensorParallel
from jaxpipe.stage.functions import StageFunctions


@dataclass
class Stopwatch:
    """Times stages on ``devices`` and keeps what it found in ``path``. ``measured`` and ``reused``: stages so far.

    Raises:
        ConfigError: the file is none of these.
    """

    devices: Sequence[jax.Device]
    path: Path
    progress: Callable[[str], None] = lambda text: None
    repeats: int = 3
    measured: int = 0
    reused: int = 0
    _known: dict[str, dict[str, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            try:
                read = json.loads(self.path.read_text(encoding="utf-8"))
                self._known = {key: {op: float(x) for op, x in row.items()} for key, row in read["seconds"].items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{self.path}: no file of measured times ({error}); remove it") from None

    def mesh(self, shards: TensorParallel) -> Mesh:
        """Return the first devices as the mesh of a rank.

        Raises:
            StageError: there are fewer.
        """
        need = shards.size * shards.cp
        if need > len(self.devices):
            raise StageError(f"a rank of {need} devices can't be measured on {len(self.devices)}")
        return Mesh(np.array(self.devices[:need], dtype=object).reshape(1, shards.cp, shards.size), AXES)

    def __call__(self, stage: StageFunctions) -> Mapping[str, float]:
        """Return the measured seconds by operation."""
        device = self.devices[0]
        where = f"{jax.__version__} {device.platform} {device.device_kind} {stage.layout.shards}"
        programs = "\n".join(f"{op} {f.jaxpr}" for op, f in stage.functions.items())
        key = hashlib.sha256(f"{where}\n{programs}".encode()).hexdigest()[:24]
        if key in self._known:
            self.reused += 1
            return self._known[key]
        try:
            costs = measure_stages([stage], repeats=self.repeats, memory=False).costs()
        except jax.errors.JaxRuntimeError as error:
            raise StageError(f"a stage can't be measured here: {str(error).splitlines()[0][:120]}") from None
        fields = {"F": costs.f_s, "B": costs.b_s, "W": costs.w_s, "BW": costs.bw_s}
        self._known[key] = {op: row[0] for op, row in fields.items()}
        self.measured += 1
        self.progress(f"measured {self.measured} stages ({self.reused} times were there already)")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps({"format": "jaxpipe measured times 1", "seconds": self._known}))
        return self._known[key]
