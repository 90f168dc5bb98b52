"""The steps of ``scripts/gpu_check``: functions that return numbers, raise Skip, or fail.

``table.py`` names them, ``scripts/gpu_step.py`` runs one. Ranks that are more than the GPUs share them, of which no
number says how fast anything is: those of several ranks are there to show that it works.
"""
