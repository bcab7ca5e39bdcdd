"""Do these tests compile? They need a process that did not start Triton's interpreter."""

import pytest
import triton

if triton.knobs.runtime.interpret:
    raise pytest.UsageError(
        "tests/kernels_compile needs its own process without TRITON_INTERPRET: run `make test`, "
        "or `env -u TRITON_INTERPRET pytest tests/kernels_compile`"
    )
