"""The one table of the package: where each name of the fork lives, what it is here, and what its arguments become."""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Ignored:
    """Accepted, with one warning where it is not the default; readable as an attribute."""

    why: str


@dataclass(frozen=True)
class Refused:
    """An error that says what to do, unless it is one of the values that ask for nothing."""

    do: str
    nothing: tuple[Any, ...] = (False, None, 0)


@dataclass(frozen=True)
class Acts:
    """Has the meaning that it says; build.py or the class does it."""

    meaning: str


_POOL = Ignored("tuned pools of an older implementation; see longspan.plan_cache and longspan.host_memory")
_DDP = Ignored("wrap the module: DistributedDataParallel(module, bucket_cap_mb=...) buckets and overlaps gradients")
_KERNEL = Ignored("the registry chooses the kernel (`longspan info --why`)")

#: What an argument becomes where our class has none of that name.
ARGUMENTS: dict[str, Ignored | Refused | Acts] = {
    **dict.fromkeys((
        "enable_memory_pool", "lightweight_pool", "enable_profiling", "use_pattern_cache", "memory_pool_threshold_mb",
        "max_cached_buffers", "cache_size", "enable_batched_ops", "enable_buffer_manager", "use_memory_efficient",
    ), _POOL),
    **dict.fromkeys(("block_size", "chunk_size_kv", "chunk_k_v", "flash_chunk_size"),
                    Ignored("scores are never stored, so there is nothing to cut into chunks")),
    **dict.fromkeys(("use_flash_attention", "use_sparse_backend", "sparse_threshold", "enable_apex_optimization",
                     "use_xformers", "op"), _KERNEL),
    "device": Acts("modules with parameters are made there; others compute where their tensors are"),
    "dtype": Acts("of parameters; modules without any take the dtype of their tensors"),
    "use_tf32": Acts("GPUs may round float32 operands to TF32; no effect where tensors are of 16 bits or on a CPU"),
    "use_gradient_checkpointing": Acts("remote rows are fetched again in backward; multihead: recomputes projections"),
    "activation_checkpointing": Acts("recomputes projections and attention in backward"),
    "use_checkpointing": Acts("remote rows are fetched again in backward"),
    "mixed_precision": Acts("on a GPU float32 tensors are computed in float16 and returned in float32"),
    "attention_scale": Acts("factor on scores, by default 1 / sqrt(head_dim)"),
    "use_memory_pool": Acts("False: workspace of CPU calls is returned to the system after each call"),
    "memory_pool_size": Acts("at most so many buffers in memory_pool, and so many MiB of idle workspace, stay"),
    "log_memory_usage": Acts("one line per call on the logger 'longspan.memory'"),
    "enable_error_recovery": Acts("out of memory: again in query chunks, the same bits; a local ring that fails: again"),
    "enable_fault_tolerance": Acts("as enable_error_recovery"),
    "batch_first": Acts("False: tensors are [tokens, batch, embed_dim]"),
    "layer_norm": Acts("q_ln before the output projection, and on queries and keys where the fork has it"),
    "zero_stage": Refused("shard parameters around the module: torch.distributed.fsdp.fully_shard(module) for stage 3, "
                          "ZeroRedundancyOptimizer for stages 1 and 2"),
    "cpu_offload": Refused("fully_shard(module, offload_policy=CPUOffloadPolicy()) does it"),
    "nvme_offload": Refused("no torch helper does it; use DeepSpeed around the module"),
    "use_8bit_optimizer": Refused("pass module.parameters() to the 8-bit optimizer of your choice"),
    "model_parallel": Refused("parallelize_module(module, mesh, {'qkv_proj': ColwiseParallel()}) of torch splits projections"),
    "compile_model": Acts("the forward is compiled: torch.compile(module)"),
    "sequence_parallel": Acts("True with a process group: the ring; False: this rank's rows alone (ring_size=1)"),
    "data_parallel": _DDP,
    **dict.fromkeys(("bucket_size", "overlap_communication", "use_gradient_compression"), _DDP),
    **dict.fromkeys(("use_deepspeed", "enable_deepspeed_integration"), Ignored("deepspeed.initialize(model=module) takes it as it is")),
    "communication_backend": Ignored("that of the process group"),
    **dict.fromkeys(("checkpoint_interval", "auto_resume"), Ignored("torch.save(module.state_dict()) where your loop wants it")),
    **dict.fromkeys(("enable_monitoring", "monitoring_interval", "profile_memory", "log_level"),
                    Ignored("monitor counts every call; logging has levels of its own")),
    **dict.fromkeys(("enable_adaptive", "min_sparsity", "max_sparsity"), Ignored("use BlockSparseAdaptive(learned=True)")),
    "distributed_config": Acts("sparsity_ratio, block_size and the pattern of the whole sequence"),
    "initial_temperature": Acts("of gate and exploration"),
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Row:
    """One name. ours: a name of longspan.torch, or of a module of this package ('configs.MultiheadConfig'); with
    `signature` a class of its own around it. renamed: the fork's argument -> ours. returns: of multihead classes."""

    name: str
    modules: tuple[str, ...]
    ours: str
    signature: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    returns: str = ""

    def parameters(self) -> list[inspect.Parameter]:
        made: dict[str, Any] = {}
        exec(f"def signature(self, {self.signature}): ...", made)
        return list(inspect.signature(made["signature"]).parameters.values())[1:]


_BRANCHES = "segment_lengths, dilation_rates, "
_POOLED = "enable_memory_pool=False, enable_profiling=False, lightweight_pool=True"
_MORE = "*, device=None, dtype=None, "
_RING_HEAD = _BRANCHES + "dropout=0.0, ring_size=None, device=None, dtype=None, " + _POOLED + ", " \
    "use_pattern_cache=True, memory_pool_threshold_mb=16.0, "
_FLASH = "use_flash_attention=True, flash_chunk_size=2048"
_RING_TAIL = "block_size=1024, use_checkpointing=False, process_group=None, deadline=None"
_RING = _RING_HEAD + "*, " + _FLASH + ", " + _RING_TAIL
_LAYERS = "dropout=0.0, bias=True, layer_norm=True, layer_norm_eps=1e-5, gamma_init=1.0, "
_MULTIHEAD = "embed_dim, num_heads, dilation_rates, segment_lengths, " + _LAYERS + "device=None, dtype=None, "
_SPARSE = (
    _BRANCHES + "sparse_config=None, {}*, dropout=0.0, ring_size=None, device=None, dtype=None, use_tf32=True, " + _POOLED
    + ", use_pattern_cache=True, enable_adaptive=False, min_sparsity=0.1, max_sparsity=0.9, pattern_type=None, "
    "sparsity_ratio=None, block_size=None"
)
#: Fields of sparse_config that factories pass by themselves.
_FIELDS = {name: f"sparse_config.{name}" for name in ("pattern_type", "sparsity_ratio", "block_size")}

#: Classes that have a constructor or a return form of their own.
CLASSES = (
    Row("DilatedAttention", ("dilated_attention",), "DilatedAttention",
        _BRANCHES + "softmax_scale=None, attention_dropout=0.0, op=None, " + _POOLED + ", *, device=None, dtype=None, "
        "use_tf32=False"),
    Row("ImprovedDilatedAttention", ("improved_dilated_attention",), "ImprovedDilatedAttention",
        _BRANCHES + "dropout=0.0, use_tf32=True, " + _POOLED + ", " + _MORE + "enable_buffer_manager=False"),
    Row("MultiheadDilatedAttention", ("multihead_dilated_attention",), "MultiheadDilatedAttention",
        _MULTIHEAD + "op=None", returns="bare"),
    Row("ImprovedMultiheadDilatedAttention", ("improved_multihead_dilated_attention",),
        "ImprovedMultiheadDilatedAttention", _MULTIHEAD + "use_tf32=True", returns="pair"),
    Row("RingDilatedAttentionV2", ("ring_dilated_attention_v2",), "RingDilatedAttention", _RING),
    Row("RingDilatedAttentionV2Collective", ("ring_dilated_attention_v2_collective",), "RingDilatedAttention", _RING),
    Row("RingDilatedAttentionV2Flash", ("ring_dilated_attention_v2_flash",), "RingDilatedAttention",
        _RING_HEAD + _FLASH + ", *, " + _RING_TAIL),
    Row("TrueRingDilatedAttention", ("true_ring_dilated_attention",), "RingDilatedAttention",
        _BRANCHES + "dropout=0.0, ring_size=1, chunk_size_kv=None, device=None, dtype=None"),
    Row("SimulatedRingDilatedAttention", ("simulated_ring_dilated_attention",), "RingDilatedAttention",
        _BRANCHES + "dropout=0.0, ring_size=1, chunk_k_v=True, device=None, dtype=None"),
    Row("DistributedImprovedDilatedAttention", ("improved_distributed_dilated_attention",), "RingDilatedAttention",
        _BRANCHES + "dropout=0.0, use_tf32=True, sequence_parallel=False, model_parallel=False, "
        "use_flash_attention=True, dtype=None, device=None"),
    Row("DistributedImprovedMultiheadDilatedAttention", ("improved_distributed_dilated_attention",),
        "RingAdvancedDistributedDilatedAttention",
        "embed_dim, num_heads, segment_lengths, dilation_rates, " + _LAYERS + "device=None, dtype=None, use_tf32=True, "
        "sequence_parallel=False, model_parallel=False, use_deepspeed=True, use_gradient_checkpointing=False, "
        "communication_backend='nccl', cpu_offload=False, use_8bit_optimizer=False, use_flash_attention=True, "
        "compile_model=False", returns="bare"),
    Row("RingDistributedDilatedAttention", ("ring_distributed_dilated_attention",),
        "RingAdvancedDistributedDilatedAttention",
        "embed_dim, num_heads, segment_lengths, dilation_rates, " + _LAYERS + "block_size=1024, ring_size=None, "
        "use_checkpointing=True, model_parallel=False, sequence_parallel=True, data_parallel=True, use_deepspeed=True, "
        "zero_stage=0, cpu_offload=False, nvme_offload=False, use_8bit_optimizer=False, "
        "use_gradient_compression=False, activation_checkpointing=False, communication_backend='nccl', bucket_size=25, "
        "overlap_communication=True, enable_fault_tolerance=True, checkpoint_interval=1000, auto_resume=True, "
        "enable_monitoring=True, profile_memory=False, log_level='INFO', use_tf32=True, use_flash_attention=True, "
        "compile_model=False, device=None, dtype=None, process_group=None, deadline=None", returns="pair"),
    Row("BlockSparseRingDilatedAttention", ("block_sparse_ring_dilated_attention",), "BlockSparseRingDilatedAttention",
        _SPARSE.format(""), _FIELDS),
    Row("BlockSparseOptimized", ("block_sparse_optimized",), "BlockSparseRingDilatedAttention",
        _SPARSE.format("enable_batched_ops=True, cache_size=100, "), _FIELDS),
    Row("BlockSparseTorchSparse", ("block_sparse_torch_sparse",), "BlockSparseRingDilatedAttention",
        _SPARSE.format("use_sparse_backend=True, sparse_threshold=0.8, "), _FIELDS),
    Row("BlockSparseRingDistributedDilatedAttention", ("block_sparse_ring_distributed_dilated_attention",),
        "BlockSparseRingDilatedAttention",
        _BRANCHES + "distributed_config=None, enable_deepspeed_integration=True, enable_apex_optimization=True, "
        "monitoring_interval=100, *, dropout=0.0, ring_size=None, device=None, dtype=None, " + _POOLED),
    Row("BlockSparseRingMultiheadDilatedAttention", ("block_sparse_ring_multihead_dilated_attention",),
        "BlockSparseRingMultiheadDilatedAttention",
        "embed_dim, num_heads, segment_lengths, dilation_rates, dropout=0.0, bias=True, sparse_config=None, "
        "batch_first=True, *, layer_norm=False, layer_norm_eps=1e-5, gamma_init=1.0, ring_size=None, device=None, "
        "dtype=None, " + _POOLED + ", use_pattern_cache=True", returns="bare"),
    Row("BlockSparseHierarchical", ("block_sparse_hierarchical",), "BlockSparseHierarchical",
        _BRANCHES + "hierarchical_config=None, sparse_config=None, *, dropout=0.0, num_heads=None, head_dim=None, "
        "ring_size=None, device=None, dtype=None, enable_batched_ops=True, cache_size=100, " + _POOLED),
    Row("BlockSparseAdaptive", ("block_sparse_adaptive",), "BlockSparseAdaptive",
        _BRANCHES + "num_heads, head_dim, adaptive_config=None, *, sparse_config=None, dropout=0.0, ring_size=None, "
        "learned=True, device=None, dtype=None, enable_batched_ops=True, cache_size=100, block_size=None, " + _POOLED,
        {"block_size": "sparse_config.block_size"}),
)  # fmt: skip


def _rows(module: str, names: str, origin: str = "") -> tuple[Row, ...]:
    """Names of a module that are what `origin` has under the same name (longspan.torch, or a module of this package)."""
    return tuple(Row(name, tuple(module.split()), f"{origin}.{name}" if origin else name) for name in names.split())


#: Names that are the objects of this package, or of longspan.torch, as they are.
NAMES = (
    *_rows("core.config core", "DilatedAttentionConfig MultiheadConfig RingAttentionConfig SparseAttentionConfig "
           "DistributedConfig MemoryPoolConfig", "configs"),
    Row("RingAttentionConfig", ("ring_dilated_attention_production",), "configs.ProductionRingConfig"),
    *_rows("ring_dilated_attention_production", "RingDilatedAttentionProduction create_production_ring_attention", "configured_ring"),
    *_rows("ring_dilated_attention_production", "MemoryPool", "caches"),
    *_rows("block_sparse_ring_distributed_dilated_attention", "DistributedSparseConfig DistributedSparsePattern", "configs"),
    *_rows("block_sparse_ring_dilated_attention", "SparsePatternConfig"),
    *_rows("block_sparse_hierarchical", "HierarchicalConfig"),
    *_rows("block_sparse_hierarchical", "create_hierarchical_attention get_hierarchical_presets", "factories"),
    *_rows("block_sparse_optimized", "PersistentPatternCache", "caches"),
    *_rows("block_sparse_adaptive", "AdaptiveConfig ImportanceScorer AdaptiveSparsityTrainer", "adaptive"),
    *_rows("block_sparse_adaptive", "create_adaptive_block_sparse", "factories"),
    *_rows("core.factory core", "create_dilated_attention create_multihead_dilated_attention "
           "create_block_sparse_attention create_adaptive_sparse_attention register_attention "
           "register_multihead_attention", "factories"),
    *_rows("core.factory", "_ATTENTION_REGISTRY _MULTIHEAD_REGISTRY _ensure_implementations_registered "
           "_get_config_class _select_best_attention_type GPU_TYPE HAS_FLASH_ATTN HAS_FLASH_ATTN_3", "factories"),
    *_rows("core.constants core", "GPU_TYPE CURRENT_OPTIMAL_SETTINGS TORCH_VERSION HAS_FLASH_ATTN HAS_FLASH_ATTN_3 HAS_SDPA "
           "HAS_SDPA_KERNEL HAS_XFORMERS HAS_DEEPSPEED HAS_FAIRSCALE HAS_APEX FLASH_ATTN_VERSION XFORMERS_VERSION "
           "DEEPSPEED_VERSION FAIRSCALE_VERSION APEX_VERSION", "factories"),
    *_rows("core.constants", "logger detect_gpu_type get_current_optimal_settings", "factories"),
    *_rows("core.base core", "BaseDilatedAttention BaseMultiheadDilatedAttention", "bases"),
    *_rows("utils.validation utils core", "ValidationMixin", "validation"),
    *_rows("core.memory_pool core", "UnifiedMemoryPool get_global_memory_pool reset_global_memory_pool", "caches"),
    *_rows("core.pattern_cache core", "PatternCache DilatedPatternCache get_global_pattern_cache clear_global_cache", "caches"),
    *_rows("core.optimized_pattern_cache core", "OptimizedPatternCache get_optimized_pattern_cache clear_optimized_cache", "caches"),
    *_rows("utils.attention_utils core", "compute_attention_scores apply_dilated_attention_pattern create_dilated_mask "
           "create_block_diagonal_mask optimize_attention_computation standard_attention compute_alibi_bias "
           "compute_rotary_embeddings apply_rotary_embeddings merge_attention_heads split_attention_heads", "functions"),
    *_rows("utils.attention_utils utils", "create_4d_causal_mask apply_head_specific_masks compute_position_embeddings "
           "get_attention_backend_info optimize_attention_computation merge_attention_heads split_attention_heads", "functions"),
    *_rows("utils.attention_utils", "HAS_FLASH_ATTN HAS_SDPA", "factories"),
    *_rows("utils.flash_attention_utils utils", "get_flash_attention_support select_attention_backend "
           "flash_attention_forward chunked_flash_attention", "functions"),
    *_rows("utils.gpu_utils utils", "get_gpu_compute_capability is_pascal_or_older get_optimal_dtype warn_suboptimal_dtype", "functions"),
    *_rows("utils.return_standardizer", "standardize_attention_output", "functions"),
    *_rows("utils.sparse_pattern_utils", "PatternType PatternConfig", "configs"),
    *_rows("utils.sparse_pattern_utils", "SparsePatternGenerator PatternQualityAnalyzer PatternQualityMetrics PatternOptimizer "
           "save_sparse_pattern load_sparse_pattern analyze_pattern_statistics optimize_pattern_for_hardware", "patterns"),
    *_rows("long_net", "LongNet LongNetLM"),
    *_rows("transformer", "DilatedTransformerEncoderLayer DilatedTransformerDecoderLayer"),
    *_rows("transformer_refactored", "create_encoder_layer create_decoder_layer", "factories"),
    *_rows("transformer_refactored", "TransformerLayerConfig", "configs"),
    Row("create_dilated_attention", ("dilated_attention",), "factories.create_standard"),
    Row("create_improved_dilated_attention", ("improved_dilated_attention",), "factories.create_improved"),
    Row("create_multihead_dilated_attention", ("multihead_dilated_attention",), "factories.create_multihead"),
    Row("create_improved_multihead_dilated_attention", ("improved_multihead_dilated_attention",),
        "factories.create_improved_multihead"),
    Row("create_ring_dilated_attention_v2_collective", ("ring_dilated_attention_v2_collective",), "factories.create_ring"),
)  # fmt: skip

#: Modules whose names the fork's `__init__` does not have.
_INNER = frozenset({"core.config", "core.factory", "core.constants", "core.base", "core", "core.memory_pool", "core.pattern_cache",
          "core.optimized_pattern_cache", "utils", "utils.attention_utils", "utils.flash_attention_utils", "utils.gpu_utils",
          "utils.return_standardizer", "utils.validation", "transformer_refactored", "true_ring_dilated_attention",
          "simulated_ring_dilated_attention", "ring_distributed_dilated_attention", "utils.sparse_pattern_utils"})  # fmt: skip


def inner_modules() -> frozenset[str]:
    return _INNER


#: fkodom's package: where its names live. Its classes are those of longspan.torch as they are, and return (out, None).
FKODOM = {
    "dilated_attention": "DilatedAttention MultiheadDilatedAttention",
    "transformer": "DilatedTransformerEncoderLayer DilatedTransformerDecoderLayer",
    "long_net": "LongNet LongNetLM",
}

#: Modules and names that are not offered, each with its reason.
POINTLESS = {
    "core.bucketed_memory_pool, core.enhanced_memory_pool, core.fragment_aware_pool, core.numa_aware_pool":
        "strategies of the fork's buffer pools: torch's allocator and Longspan's workspace pools do this",
    "core.memory_profiler, core.memory_visualizer": "profile those pools; torch.cuda.memory has snapshots of everything",
    "core.simple_gpu_cache": "keeps indices of dilated rows: no index exists here",
    "distributed_dilated_attention.DistributedMultiheadDilatedAttention":
        "a LightningModule around one layer: put MultiheadDilatedAttention into your own",
    "improved_distributed_dilated_attention.DeepSpeedDilatedAttentionEngine, get_recommended_config, create_distributed_model":
        "write configurations of DeepSpeed, which takes modules of ours as they are; the model is LongNetLM",
    "block_sparse_ring_distributed_dilated_attention.AdaptiveMemoryPool, GradientCompressor, "
    "HierarchicalSparsePatternGenerator, OptimizedGradientCommunicator":
        "inner parts of one class; DistributedDataParallel has communication hooks",
    "utils.flash_attention_3_utils": "asks for FlashAttention 3, which is not used; `longspan info` lists the kernels",
    "utils.sparse_pattern_utils.PatternVisualizer": "longspan.draw(pattern, tokens) and `longspan pattern` draw any pattern",
    "utils.return_standardizer.MultiheadAttentionWrapper": "standardize_attention_output does the same to a result",
    "transformer_refactored.DilatedTransformerEncoderLayer, DilatedTransformerDecoderLayer":
        "take a config object: create_encoder_layer(**vars(config)) makes the layer",
}  # fmt: skip


def treatment(row: Row, parameter: inspect.Parameter, known: Any) -> tuple[str, str]:
    """(what, words) of an argument: passed on under a name, or what ARGUMENTS says."""
    name = parameter.name
    acts = ARGUMENTS.get(name)
    if name in row.renamed:
        return "passed", f"`{row.renamed[name]}`"
    if isinstance(acts, Refused):
        return "refused", acts.do
    if name in known:
        return "passed", acts.meaning if isinstance(acts, Acts) else "the same"
    if acts is None:
        raise KeyError(f"{row.name}: {name} is in no table")
    return ("ignored", acts.why) if isinstance(acts, Ignored) else ("acts", acts.meaning)


def markdown(name: str = "") -> str:
    """The mapping as Markdown: of all classes, or of one name."""
    from . import configured_ring
    from .build import parameters_of_ours

    rows = [*CLASSES, configured_ring.ROW]
    lines = []
    for row in rows:
        if name and row.name != name:
            continue
        returns = {"": "", "bare": " Returns the tensor alone unless `need_weights`.", "pair": " Returns `(out, None)`."}
        head = f"`longspan.torch.{row.ours}`, in `dilated_attention_pytorch.{row.modules[0]}`.{returns[row.returns]}"
        lines += [f"### {row.name}", "", textwrap.fill(head, 120, break_on_hyphens=False), ""]
        same, told = [], []
        for parameter in row.parameters():
            what, words = treatment(row, parameter, parameters_of_ours(row))
            if what == "passed" and words == "the same":
                same.append(f"`{parameter.name}`")
            else:
                told.append(f"| `{parameter.name}` | {what} | {words} |")
        lines += [textwrap.fill("As here: " + ", ".join(same) + ".", 120, break_on_hyphens=False), ""]
        if told:
            lines += ["| argument | | meaning, or what to do |", "|---|---|---|", *told, ""]
    if not name:
        lines += ["### Names that are not offered", "", "| name | reason |", "|---|---|"]
        lines += [f"| {what} | {why} |" for what, why in POINTLESS.items()]
    return "\n".join(lines) + "\n"
