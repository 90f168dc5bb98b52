"""The benchmark of the project: ``mpikv bench`` with more to measure, beside PyTorch, files and NCCL.

``scripts/bench`` runs it; docs/bench has its record.
"""
