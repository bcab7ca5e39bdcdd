"""Do these tests run Triton's interpreter? They need a process that started with it."""

import pytest
import torch
import triton

if not triton.knobs.runtime.interpret:
    raise pytest.UsageError(
        "tests/kernels_interp needs its own process with TRITON_INTERPRET=1 set before Python "
        "starts: run `make test`, or `TRITON_INTERPRET=1 pytest tests/kernels_interp`"
    )

torch.set_num_threads(1)
