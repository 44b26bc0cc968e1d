"""Start the processes of a run: here, or by files for Slurm and Kubernetes. Imports no JAX."""

from jaxpipe.lazy import exported

__all__, __getattr__ = exported(__name__, local="ClusterJob Launch follow_launcher jobset sbatch")
