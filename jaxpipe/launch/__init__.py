"""Starts the processes of a run: here, or by files for Slurm and Kubernetes. Imports no JAX."""
