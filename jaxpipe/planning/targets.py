"""Machines by name: what one GPU computes, holds and moves, and how GPUs are linked.

Peak rates are the vendor's dense ones (no sparsity). Sources: NVIDIA's data sheets "A100 Tensor Core GPU" (2021), "H100 Tensor
Core GPU" (2023), "H200 Tensor Core GPU" (2024), "HGX/DGX B200" (2024); A800 and H20 are the export variants (A800: NVLink cut
to 400 GB/s; H20: 148 TFLOP/s in bfloat16, 96 GB). Bandwidths are per direction: NVLink 3/4/5 are sold as 600/900/1800 GB/s
both ways together; PCIe 4.0 x16 and 5.0 x16 carry 32 and 64 GB/s each way before protocol; networks are one 200 Gb/s (A100
nodes), 400 Gb/s (H100, H200, H20, B200) port a GPU. Latencies are ours (NCCL point-to-point, rounded), not a data sheet's.
``memory_bytes`` is what the driver reports where known (H100: 84,942,979,072).

On HGX A100 boards two GPUs hang on one PCIe switch with one uplink, so ``gpus_per_host_link`` is 2 there
(`pipeoffload.txt` section 4.2); on HGX H100 and later each GPU has its own x16 link to a switch with as much uplink.

The device description that XLA compiles for (:func:`device_text`) holds the same figures and the limits of the compute
capability, which CUDA's programming guide tabulates.

Not modelled: clocks that fall under load, and contention of links beyond what ``gpus_per_host_link`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from jaxpipe.errors import ConfigError
from jaxpipe.text import closest
from jaxpipe.train.settings.typed import Collected, not_empty, positive, read_mapping, within

_GB = 1e9
_TFLOP = 1e12
_MOST = 1e24  # of any figure in a file
_Name = Annotated[str, not_empty]
_Count = Annotated[int, within(1, 2**62)]
_Figure = Annotated[float, positive, within(0, _MOST)]
_Seconds = Annotated[float, within(0, _MOST)]


def _has_float32(rates: Mapping[str, float]) -> str:
    return "" if "float32" in rates else "must have float32, too"


@dataclass(frozen=True, slots=True)
class Chip:
    """The values that XLA's description of a GPU needs beside rates: numbers of the compute capability and of the chip."""

    capability: tuple[Annotated[int, within(0)], Annotated[int, within(0)]]
    cores: _Count
    fpus_per_core: _Count
    clock_ghz: _Figure
    l2_bytes: _Count
    shared_memory_per_core: _Count


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of GPU (or CPU) and the machine around it. Rates per device and direction; latencies in seconds.

    ``flops_per_s``: dense peak by dtype of the operands of a matrix product (``bfloat16 float16 float32 float64``; float32 is
    TF32, which is what JAX's default precision runs). ``node_size``: devices joined by ``link``; others by ``network``.
    ``gpus_per_host_link``: devices that share one link to the host. ``host_duplex``: whether both directions of it run at
    once. ``chip``: None where compiling without the device is not possible. ``matmul_efficiency``: part of the dense peak that
    matrix products reach in a step.
    """

    name: _Name
    description: _Name
    flops_per_s: Annotated[Mapping[str, _Figure], _has_float32]
    memory_bytes: _Figure
    memory_bytes_per_s: _Figure
    link_bytes_per_s: _Figure
    network_bytes_per_s: _Figure
    d2h_bytes_per_s: _Figure
    h2d_bytes_per_s: _Figure
    node_size: _Count = 8
    link_latency_s: _Seconds = 4e-6
    network_latency_s: _Seconds = 10e-6
    host_latency_s: _Seconds = 10e-6
    gpus_per_host_link: _Count = 1
    host_duplex: bool = True
    chip: Chip | None = None
    matmul_efficiency: Annotated[float, positive, within(0, 1)] = 0.75

    def peak_flops_per_s(self, dtype: str) -> float:
        """Dense peak for products of this dtype; float32's for a dtype without an entry."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


def peak_of(device_kind: str, dtype: str) -> float | None:
    """Return the dense peak, in FLOP/s, of the GPU that JAX calls ``device_kind``; None if there is no target for it."""
    peaks = (t.peak_flops_per_s(dtype) for t in TARGETS.values() if t.chip and t.description == device_kind)
    return next(peaks, None)


def _gpu(
    name: str,
    description: str,
    tflops: tuple[float, float, float],
    memory: tuple[float, float],
    link: float,
    network: float,
    host: float,
    chip: Chip,
    **fields: Any,
) -> Target:
    """``tflops``: 16-bit, TF32, float64; ``memory``: bytes, GB/s; the rest GB/s per direction."""
    half, single, double = (x * _TFLOP for x in tflops)
    return Target(
        name,
        description,
        MappingProxyType({"bfloat16": half, "float16": half, "float32": single, "float64": double}),
        memory[0],
        memory[1] * _GB,
        link * _GB,
        network * _GB,
        host * _GB,
        host * _GB,
        chip=chip,
        # Transformer passes on an A100 reach 61 to 66% of peak (`controllable-memory.txt` table 5), with 0.75 0.60 to 0.66. In
        # steps of a GPT on an H200, 0.66 gives the measured seconds at hidden 4096 and 8192 within 2%, less the adds that W
        # has no longer (scripts/results/gpu-h200.json); later chips are taken to be alike.
        matmul_efficiency=0.75 if chip.capability < (9, 0) else 0.66,
        **fields,
    )


_AMPERE = Chip((8, 0), 108, 64, 1.41, 41_943_040, 167_936)
_HOPPER = Chip((9, 0), 132, 128, 1.98, 52_428_800, 233_472)
_H20 = Chip((9, 0), 78, 128, 1.98, 62_914_560, 233_472)
_BLACKWELL = Chip((10, 0), 148, 128, 1.965, 132_120_576, 233_472)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        t.name: t
        for t in (
            _gpu("a100", "NVIDIA A100-SXM4-80GB", (312, 156, 19.5), (85_094_694_912, 2039), 300, 25, 32, _AMPERE,
                 gpus_per_host_link=2),
            _gpu("a100-40", "NVIDIA A100-SXM4-40GB", (312, 156, 19.5), (42_298_834_944, 1555), 300, 25, 32, _AMPERE,
                 gpus_per_host_link=2),
            _gpu("a800", "NVIDIA A800-SXM4-80GB", (312, 156, 19.5), (85_094_694_912, 2039), 200, 25, 32, _AMPERE,
                 gpus_per_host_link=2),
            _gpu("h100", "NVIDIA H100 80GB HBM3", (989.4, 494.7, 66.9), (84_942_979_072, 3352.32), 450, 50, 64, _HOPPER),
            _gpu("h200", "NVIDIA H200", (989.4, 494.7, 66.9), (150_754_820_096, 4800), 450, 50, 64, _HOPPER),
            _gpu("h20", "NVIDIA H20", (148, 74, 1), (102_625_181_696, 4000), 450, 50, 64, _H20),
            _gpu("b200", "NVIDIA B200", (2250, 1125, 37), (191_500_000_000, 7700), 900, 50, 64, _BLACKWELL),
            Target(
                "cpu",
                "two cores of a server CPU (nominal)",
                MappingProxyType({"bfloat16": 5e10, "float16": 5e10, "float32": 1e11, "float64": 5e10}),
                16e9, 2e10, 5e9, 1e9, 5e9, 5e9,
            ),
        )
    }
)  # fmt: skip
"""Known machines by name."""


def target_json(target: Target) -> dict[str, Any]:
    """Return the fields as plain values; a file of them is read back by :func:`find_target`."""
    plain = asdict(replace(target, flops_per_s=dict(target.flops_per_s)))
    return {key: value for key, value in plain.items() if value is not None}


def device_text(target: Target) -> str:
    """Return XLA's description of the device, as a text proto, for compiling without one.

    Raises:
        ConfigError: the target has no chip numbers.
    """
    chip = target.chip
    if chip is None:
        raise ConfigError(f"target {target.name} has no 'chip' numbers, so XLA can't compile for it without the device")
    major, minor = chip.capability
    return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {chip.shared_memory_per_core}
  threads_per_core_limit: 2048
  core_count: {chip.cores}
  fpus_per_core: {chip.fpus_per_core}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(target.memory_bytes_per_s)}
  l2_cache_size: {chip.l2_bytes}
  clock_rate_ghz: {chip.clock_ghz}
  device_memory_size: {int(target.memory_bytes)}
  shared_memory_per_block_optin: {chip.shared_memory_per_core - 1024}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 6 }}
device_description_str: "{target.description}"
"""


def find_target(name_or_path: str) -> Target:
    """Return a built-in target by name, or the one that a ``.json`` file describes.

    The file is an object of :class:`Target`'s fields. ``base`` names a known target whose values it changes; without it, all
    fields that have no default are needed.

    Raises:
        ConfigError: unknown name (lists the known), unreadable file, or wrong values (all of them, joined by ``"; "``).
    """
    if name_or_path in TARGETS:
        return TARGETS[name_or_path]
    if not name_or_path.endswith(".json"):
        raise ConfigError(
            f"unknown target {name_or_path!r}{closest(name_or_path, TARGETS)}; known: {', '.join(TARGETS)}, or the path of a "
            ".json file"
        )
    data = dict(read_mapping(Path(name_or_path), "target file"))
    base, place, target_fields = data.pop("base", None), f"target {name_or_path}", Collected(Target)
    if base is not None and str(base) not in TARGETS:
        target_fields.problem(place, f"base is {base!r}; known: {', '.join(TARGETS)}")
    stem = Path(name_or_path).stem
    target_fields.add_table({"name": stem, "description": stem, **data}, place)
    if base is None:
        target_fields.add_missing(place, "without a base it needs")
    target_fields.refuse()
    return target_fields.build(Target) if base is None else replace(TARGETS[base], **target_fields.values)
