"""Measures every Python process of a test session; it is found where this folder is in PYTHONPATH."""

import coverage

coverage.process_startup()
