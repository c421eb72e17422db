"""Settings all tests share."""

import os

# Some virtual machines announce AMX and then trap on it inside torch's own bfloat16 matrix product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")

try:
    import torch
except ModuleNotFoundError:
    pass
else:
    torch.set_num_threads(1)  # tensors here are tiny; torch's second thread would only spin and slow its neighbours
