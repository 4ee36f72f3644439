"""Makes tests/support importable, and keeps torch to one thread: tests run side by side."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
torch.set_num_threads(1)
