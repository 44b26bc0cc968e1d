"""Define the settings of a run: typed values, and the sections they stand in."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    sections="DataConfig ModelConfig OptimizerConfig PipelineConfig RunConfig Sections",
    typed="Collected decode fit within",
)
