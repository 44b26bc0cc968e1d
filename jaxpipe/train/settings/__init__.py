"""Define the settings of a run: typed values, the sections they stand in, and the rules that hold between them."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    sections="DataConfig ModelConfig OptimizerConfig PipelineConfig RunConfig Sections",
    typed="Collected decode fit within",
    rules="broken_rules",
)
