"""Starts the processes of a run: here, or by files for Slurm and Kubernetes. Imports no JAX."""

from jaxpipe.launch.cluster import Job, jobset, sbatch
from jaxpipe.launch.local import Launch, follow_launcher

__all__ = ["Job", "Launch", "follow_launcher", "jobset", "sbatch"]
