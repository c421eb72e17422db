"""Under torchrun, for test_ring.py: whatever takes a process group, before there is one, with one, and after it is gone."""

import os

import torch
import torch.distributed as dist

import longspan
import longspan.torch as lt

SEGMENTS, RATES, SPARSE = [16, 64], [1, 2], {"block_size": 16, "sparsity_ratio": 1.0}
torch.manual_seed(0)
WHOLE = torch.randn(1, 64, 2, 16)
WIDE = torch.randn(1, 64, 32)


def modules(**arguments):
    """Name -> a module and the whole sequence it takes."""
    torch.manual_seed(1)
    multihead = lt.RingMultiheadDilatedAttention(32, 2, RATES, SEGMENTS, **arguments)
    advanced = lt.RingAdvancedDistributedDilatedAttention(32, 2, SEGMENTS, RATES, **arguments)
    return {
        "ring": (lt.RingDilatedAttention(SEGMENTS, RATES, **arguments), WHOLE),
        "v2": (lt.RingDilatedAttentionV2(SEGMENTS, RATES, **arguments), WHOLE),
        "collective": (lt.RingDilatedAttentionV2Collective(SEGMENTS, RATES, **arguments), WHOLE),
        "production": (lt.create_production_ring_attention(SEGMENTS, RATES, **arguments), WHOLE),
        "multihead": (multihead, WIDE),
        "advanced": (advanced, WIDE),
    }


def block_sparse(ring_size):
    return lt.BlockSparseRingDilatedAttention(SEGMENTS, RATES, SPARSE, ring_size=ring_size)


def call(module, x):
    out = module(x, x, x)
    return out[0] if isinstance(out, tuple) else out


def refused(work, *words):
    try:
        work()
    except longspan.InvalidArgument as error:
        assert error.argument == "process_group" and all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("computed alone, silently")


def refused_without_a_group(processes):
    words = ("init_process_group", f"WORLD_SIZE is {processes}")
    for module, x in modules().values():
        refused(lambda: call(module, x), *words)
    refused(lambda: call(block_sparse(processes), WHOLE), *words)
    refused(lambda: lt.shard(WHOLE), *words)
    refused(lambda: lt.unshard(WHOLE), *words)


def main():
    processes = int(os.environ["WORLD_SIZE"])
    alone = {name: call(module, x) for name, (module, x) in modules(ring_size=1).items()}
    sparse = call(block_sparse(None), WHOLE)
    if processes == 1:  # nobody to wait for: no group is needed
        for name, (module, x) in modules().items():
            assert torch.equal(call(module, x), alone[name]), name
        assert lt.unshard(WHOLE) is WHOLE
    else:
        refused_without_a_group(processes)
    dist.init_process_group("gloo")
    for name, (module, x) in modules().items():
        torch.testing.assert_close(call(module, lt.shard(x)), lt.shard(alone[name]), rtol=1e-5, atol=1e-6, msg=name)
    assert torch.equal(call(block_sparse(processes), lt.shard(WHOLE)), lt.shard(sparse))
    assert torch.equal(lt.unshard(lt.shard(WHOLE)), WHOLE)
    if processes > 1:
        others = dist.new_group([0])
        if dist.get_rank() == 1:
            for module, x in modules(process_group=others).values():
                refused(lambda: call(module, x), "does not contain this process")
            refused(lambda: lt.unshard(WHOLE, process_group=others), "does not contain this process")
    dist.barrier()
    dist.destroy_process_group()
    if processes > 1:
        refused_without_a_group(processes)


main()
