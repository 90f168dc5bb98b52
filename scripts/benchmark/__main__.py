"""Runs the benchmark:  python scripts/benchmark --only resnet50"""

import sys
from pathlib import Path

if not __package__:
    # Given as a folder, Python looks for modules in it, and not beside it.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from benchmark.program import main

if __name__ == "__main__":
    sys.exit(main())
