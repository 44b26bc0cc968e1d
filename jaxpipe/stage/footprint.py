"""What XLA says a compiled stage function takes, in bytes per device."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.stage.functions import StageFunction


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes per device: workspace (``temp_bytes``), arguments, results, results that reuse donated arguments (``alias_bytes``),
    machine code."""

    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    code_bytes: int


def footprint(function: StageFunction) -> Footprint:
    """The figures of ``memory_analysis()``. Compiles the function if it has not run yet; later calls use what was compiled."""
    m = function.jitted.lower(*function.avals_in).compile().memory_analysis()
    return Footprint(
        temp_bytes=int(m.temp_size_in_bytes),
        argument_bytes=int(m.argument_size_in_bytes),
        output_bytes=int(m.output_size_in_bytes),
        alias_bytes=int(m.alias_size_in_bytes),
        code_bytes=int(m.generated_code_size_in_bytes),
    )
