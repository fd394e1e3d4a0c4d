"""Settings that must be in place before any test module imports Triton or Torch."""

import os

import torch

if not torch.cuda.is_available():
    # Read when @triton.jit executes, so it cannot wait for the kernel tests.
    os.environ.setdefault("TRITON_INTERPRET", "1")
