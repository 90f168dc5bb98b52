"""Python runs it when it starts, where the emulated CUDA's variables are set: CuPy then finds GPUs that are none."""

import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from attaching import Attaching

sys.path.pop()
sys.meta_path.insert(0, Attaching(Path(os.environ["EMULATED_CUDA"])))
