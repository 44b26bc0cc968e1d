"""Reading a checkpoint together: the columns of a row want the same arrays, so each reads some parts of it from the file
system, and gets the rest from the others, over the network between their devices.

A file system gives each byte once, to whichever number of columns. Each part is read, and verified, by one column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.runtime.processes import Processes
from jaxpipe.train.checkpoints.folders import GroupArrays
from jaxpipe.train.checkpoints.leaves import Share

_BYTES = 2**28
"""The most bytes on each device at once while columns exchange what they have read."""


def share_of_reading(processes: Processes) -> Share:
    """Return which share of the parts this process reads: one of its column, where JAX has the devices of all processes."""
    together = processes.columns > 1 and jax.process_count() == processes.number
    return (processes.column, processes.columns) if together else (0, 1)


def exchange(groups: Sequence[GroupArrays], processes: Processes) -> None:
    """Complete the arrays of ``groups``, of which every column of the row has read its share. All columns call it together."""
    column, columns = share_of_reading(processes)
    if columns == 1:
        return
    pieces_of_column = [
        [
            (arrays, k, leaf.stored_shape(piece), leaf.numpy_dtype)
            for group in groups
            for leaf, arrays in zip(group.leaves, group.arrays, strict=True)
            for k, piece in enumerate(leaf.pieces)
            if group.readers[piece.part] == reader
        ]
        for reader in range(columns)
    ]
    sizes = [sum(math.prod(shape) * dtype.itemsize for *_, shape, dtype in pieces) for pieces in pieces_of_column]
    own = [np.ascontiguousarray(arrays[k]).reshape(-1).view(np.uint8) for arrays, k, *_ in pieces_of_column[column]]
    first = processes.mine - column
    device_of = {device.process_index: device for device in reversed(jax.devices())}  # the first of each process
    devices = [device_of[process] for process in range(first, first + columns)]
    data_of_column = _gathered(np.concatenate([np.empty(0, np.uint8), *own]), sizes, devices, devices[column])
    for data, pieces in zip(data_of_column, pieces_of_column, strict=True):
        begin = 0
        for arrays, k, shape, dtype in pieces:
            end = begin + math.prod(shape) * dtype.itemsize
            arrays[k] = data[begin:end].view(dtype).reshape(shape)
            begin = end


def _gathered(
    own: np.ndarray, sizes: Sequence[int], devices: Sequence[jax.Device], own_device: jax.Device
) -> list[np.ndarray]:
    """Return the bytes that each column has; ``sizes``: how many; ``own``: those of this one; ``devices``: one of each."""
    mesh = Mesh(np.array(devices), ("columns",))
    divided, everywhere = NamedSharding(mesh, P("columns")), NamedSharding(mesh, P())
    gather = jax.jit(lambda x: x, out_shardings=everywhere)
    data_of_column = [np.empty(size, np.uint8) for size in sizes]
    length = max(1, min(_BYTES // len(devices), max(sizes)))
    for begin in range(0, max(sizes), length):
        block = np.zeros(length, np.uint8)
        block[: max(own.size - begin, 0)] = own[begin : begin + length]
        local = jax.device_put(block, own_device)
        blocks = gather(jax.make_array_from_single_device_arrays((len(devices) * length,), divided, [local]))
        for data, part in zip(data_of_column, np.asarray(blocks).reshape(len(devices), length), strict=True):
            data[begin : begin + length] = part[: max(data.size - begin, 0)]
    return data_of_column
