"""Choosing devices for a run: accelerators when there are enough, emulated CPU devices otherwise.

XLA reads its flags when JAX first looks for devices, so :func:`request_devices` must come before anything that does. It does
not import JAX.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from jaxpipe.errors import ConfigError, RunError

if TYPE_CHECKING:
    import jax

_FLAG = "--xla_force_host_platform_device_count"
_YNN = "--xla_cpu_experimental_ynn_fusion_type"
"""Set to nothing with jaxlib 0.10: its fused reductions on CPU give wrong sums for some shapes (jax#39103). Costs about 10%."""
_MAX_EMULATED = 512


def request_devices(count: int, platform: Literal["auto", "cpu", "gpu"] = "auto") -> None:
    """Ask XLA to emulate at least ``count`` CPU devices (it changes nothing for accelerators), and pick the platform.

    Raises:
        ConfigError: ``count`` is absurd.
    """
    if not 1 <= count <= _MAX_EMULATED:
        raise ConfigError(f"{count} devices asked for; want 1 to {_MAX_EMULATED}")
    flags = os.environ.get("XLA_FLAGS", "")
    given = re.search(rf"{_FLAG}=(\d+)", flags)
    if given is None:
        os.environ["XLA_FLAGS"] = f"{flags} {_FLAG}={count}".strip()
    elif int(given[1]) < count:
        os.environ["XLA_FLAGS"] = flags.replace(given[0], f"{_FLAG}={count}")
    if importlib.metadata.version("jaxlib").startswith("0.10.") and _YNN not in os.environ["XLA_FLAGS"]:
        os.environ["XLA_FLAGS"] += f" {_YNN}="
    if platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"


def find_devices(
    count: int, platform: Literal["auto", "cpu", "gpu"] = "auto", *, tp: int = 1
) -> tuple[Sequence[jax.Device], str]:
    """``count`` devices and a remark for people (empty if there is nothing to remark). ``tp``: of the config, for advice.

    Raises:
        ConfigError: there are not enough; names ways to use those that there are.
    """
    import jax

    if platform == "gpu":
        try:
            devices = jax.devices("gpu")
        except RuntimeError:
            raise ConfigError(
                "run.platform=gpu, but JAX sees no GPU: install jaxpipe[cuda13] (or [cuda12]), or use auto"
            ) from None
    elif platform == "cpu":
        devices = jax.devices("cpu")
    else:
        devices = jax.devices()
    if len(devices) >= count:
        return devices[:count], ""
    kind = devices[0].platform
    emulated = jax.devices("cpu") if platform == "auto" and kind != "cpu" else []
    if len(emulated) >= count:
        return emulated[
            :count
        ], f"{len(devices)} {kind} device(s) are too few for {count} places: running on emulated CPU devices"
    raise ConfigError(
        f"{count} devices are needed and JAX sees {len(devices)} ({kind}); {_factorings(len(devices), tp)}, or before JAX "
        f"starts set XLA_FLAGS={_FLAG}={count}"
    )


def _factorings(have: int, tp: int) -> str:
    """Advice: the ways to use all of ``have`` devices, those with ``tp`` first; at most four."""
    ways = [(have // (t * d), t, d) for t in range(1, have + 1) if have % t == 0 for d in _divisors(have // t)]
    nearest = sorted(ways, key=lambda way: (way[1] != tp, way[1], way[2]))[:4]
    return "ways to use these (--pp --tp --dp): " + ", ".join(f"{p}×{t}×{d}" for p, t, d in nearest)


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


@contextmanager
def device_errors(doing: str) -> Iterator[None]:
    """Errors of a device inside the block, such as memory that ran out, become one line that begins with ``doing``.

    Raises:
        RunError: instead of JAX's error.
    """
    import jax

    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise RunError(f"{doing}: a device failed: {gist(error)}") from error


def gist(error: Exception) -> str:
    """First and last line of a message of XLA's, which may hold a stack trace or a memory map in between."""
    lines = [line.strip()[:200] for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = lines[0] if len(lines) == 1 else f"{lines[0]} … {lines[-1]}"
    if "RESOURCE_EXHAUSTED" not in text:
        return text
    return f"{text}; out of device memory: use a smaller batch, more microbatches or ranks, or pipeline.recompute=full"
