"""Settings all tests share."""

import os

# Some virtual machines announce AMX and then trap on it inside torch's own bfloat16 matrix product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
