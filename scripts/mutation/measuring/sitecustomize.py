"""Measures every Python process of a test session, as part of the test that has started it; it is found where this
folder is in PYTHONPATH.
"""

import os

import coverage

if measured := coverage.process_startup():
    measured.switch_context(os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0])
