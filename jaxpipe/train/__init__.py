"""Trains: config, data, step, loop, checkpoint, metrics. The only room that knows a step number or a learning rate.

Importing this package imports no JAX; the modules that need it import it themselves.
"""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(
    __name__,
    checkpoint="Checkpoint CheckpointStore load_params read_manifest",
    config="TrainConfig broken_rules load_config",
    data="Dataset TokenDataset",
    devices="find_devices request_devices",
    evaluate="generate held_out_score load_data load_trained",
    import_export="export_hub import_hub",
    loop="TrainResult train",
    state="StepMetrics TrainState",
    step="TrainStep",
    trainer="Trainer",
)
