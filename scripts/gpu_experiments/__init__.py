"""Experiments that ``scripts/gpu_truth.py`` runs on a GPU, a module per group; see its docstring."""
