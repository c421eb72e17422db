"""The packages' own names: every row of the table, what arguments do, return forms, configs, factories, installation."""

import copy
import inspect
import logging
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torch as lt
from longspan.compat import dilated_attention_pytorch as compat
from longspan.compat.dilated_attention_pytorch import build, configured_ring, table

LISTS = {"segment_lengths": [16, 32], "dilation_rates": [1, 2]}
EVERY = [*table.CLASSES, configured_ring.ROW]
ignore_warnings = pytest.mark.filterwarnings("ignore::longspan.LongspanWarning")


@pytest.fixture
def installed():
    yield compat.install
    compat.uninstall()


def tensors(tokens=48, heads=4, width=8):
    torch.manual_seed(0)
    return [torch.randn(2, tokens, heads, width) for _ in range(3)]


def arguments(row):
    """What the row's class cannot be without."""
    known = {**LISTS, "embed_dim": 32, "num_heads": 4, "head_dim": 8}
    needed = [one.name for one in row.parameters() if one.default is inspect.Parameter.empty]
    sparse = [one.name for one in row.parameters() if one.name == "sparse_config"]
    return {**{name: known[name] for name in needed}, **{name: {"block_size": 16} for name in sparse}}


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row.name)
def test_every_argument_of_every_class_is_in_the_table(row):
    ours = build.parameters_of_ours(row)
    for parameter in row.parameters():
        what, words = table.treatment(row, parameter, ours)
        assert what in ("passed", "acts", "ignored", "refused") and words


@ignore_warnings
@pytest.mark.parametrize("row", table.CLASSES, ids=lambda row: row.name)
def test_every_class_runs_forward_and_backward_with_its_return_form(row):
    torch.manual_seed(0)
    module = compat.find(row.name)(**arguments(row)).eval()
    assert isinstance(module, getattr(lt, row.ours)) and module.num_groups == 2
    if row.returns:
        x = torch.randn(2, 48, 32, requires_grad=True)
        out = module(x, x, x)
        assert isinstance(out, tuple) == (row.returns == "pair")
        pair = module(x, x, x, need_weights=True) if row.name != "RingDistributedDilatedAttention" else (out[0], None)
        assert isinstance(pair, tuple)
        out = out[0] if row.returns == "pair" else out
        assert torch.equal(out, pair[0])
    else:
        x, key, value = tensors()
        x.requires_grad_()
        out = module(x, key, value)
        assert torch.equal(out, module(q=x, k=key, v=value)) and torch.equal(out, module(query=x, key=key, value=value))
    out.sum().backward()
    assert out.shape == x.shape and x.grad.abs().sum() > 0
    assert module.get_memory_info()["memory_complexity"] and module.get_memory_estimate(64)["total_per_device_gb"] > 0
    module.clear_cache()
    copy.deepcopy(module)


@pytest.mark.parametrize("name", ["RingDilatedAttention", "RingDilatedAttentionV2Flash", "DistributedImprovedDilatedAttention"])
def test_rings_of_the_fork_equal_one_device(name):
    query, key, value = tensors()
    wanted = lt.DilatedAttention(**LISTS)(query, key, value, is_causal=True)
    assert torch.equal(compat.find(name)(**LISTS)(query, key, value, is_causal=True), wanted)


@pytest.mark.parametrize(
    "name, argument, value, says",
    [
        ("RingDistributedDilatedAttention", "zero_stage", 3, "fully_shard"),
        ("RingDistributedDilatedAttention", "cpu_offload", True, "CPUOffloadPolicy"),
        ("DistributedImprovedMultiheadDilatedAttention", "model_parallel", True, "parallelize_module"),
        ("BlockSparseRingDilatedAttention", "pattern_type", "learned", "BlockSparseAdaptive"),
    ],
)
def test_refused_arguments_are_named_with_what_to_do(name, argument, value, says):
    row = next(row for row in table.CLASSES if row.name == name)
    with pytest.raises(longspan.InvalidArgument, match=rf"(?s){argument}.*{says}"):
        compat.find(name)(**arguments(row), **{argument: value})
    with pytest.raises(TypeError, match="no_such"):
        compat.find(name)(**arguments(row), no_such=1)


def test_ignored_arguments_warn_once_and_can_be_read_back():
    longspan._errors._warned.clear()
    with pytest.warns(longspan.LongspanWarning, match="enable_memory_pool: tuned pools"):
        module = compat.find("ImprovedDilatedAttention")(**LISTS, enable_memory_pool=True)
    assert module.enable_memory_pool is True
    compat.find("ImprovedDilatedAttention")(**LISTS, enable_memory_pool=True)  # warnings are errors here


def test_a_module_that_only_has_defaults_does_not_warn():
    longspan._errors._warned.clear()
    for row in table.CLASSES:
        compat.find(row.name)(**arguments(row))


@ignore_warnings
def test_batch_first_and_sparse_weights():
    torch.manual_seed(0)
    config = {"block_size": 16, "pattern_type": "local_window", "local_window_size": 32}
    make = compat.find("BlockSparseRingMultiheadDilatedAttention")
    module = make(32, 4, **LISTS, sparse_config=config, batch_first=False)
    x = torch.randn(48, 2, 32)
    out, weights = module(x, x, x, need_weights=True)
    other = make(32, 4, **LISTS, sparse_config=config)
    other.load_state_dict(module.state_dict())
    first = x.transpose(0, 1).contiguous()
    assert torch.allclose(out.transpose(0, 1), other(first, first, first), atol=1e-6)
    assert weights["block_size"] == 16 and torch.allclose(weights["block_values"].sum(-1).sum(), torch.tensor(2 * 4 * 48.0))


# ---- weights


@pytest.mark.parametrize("target", ["RingMultiheadDilatedAttention", "RingAdvancedDistributedDilatedAttention", "MultiheadDilatedAttention"])
def test_fused_projections_load_into_separate_ones_and_back(target):
    torch.manual_seed(0)
    fused = lt.ImprovedMultiheadDilatedAttention(32, 4, [1, 2], [16, 32], use_tf32=False)
    separate = getattr(lt, target)(32, 4, dilation_rates=[1, 2], segment_lengths=[16, 32])
    separate.load_state_dict(fused.state_dict())
    x = torch.randn(2, 40, 32)
    assert torch.allclose(separate(x)[0], fused(x)[0], atol=1e-6)
    back = lt.ImprovedMultiheadDilatedAttention(32, 4, [1, 2], [16, 32])
    back.load_state_dict(separate.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(fused.state_dict().values(), back.state_dict().values()))


@ignore_warnings
@pytest.mark.parametrize("name", ["MultiheadDilatedAttention", "ImprovedMultiheadDilatedAttention"])
def test_norms_have_the_forks_names_and_take_ours(name):
    torch.manual_seed(0)
    module = compat.find(name)(32, 4, [1, 2], [16, 32])
    assert {"q_ln.weight", "q_ln.bias", "k_ln.weight", "k_ln.bias"} <= set(module.state_dict())
    ours = getattr(lt, name)(32, 4, [1, 2], [16, 32])
    torch.nn.init.normal_(ours.norm.weight)
    module.load_state_dict(ours.state_dict())
    assert torch.equal(module.q_ln.weight, ours.norm.weight) and torch.equal(module.k_ln.weight, torch.ones(32))
    x = torch.randn(1, 40, 32)
    same = torch.allclose(module(x, need_weights=True)[0], ours(x)[0], atol=1e-6)
    assert same == (name == "ImprovedMultiheadDilatedAttention")  # the other also norms queries and keys
    pickle.loads(pickle.dumps(ours))


# ---- arguments with a meaning


def production_module(**fields):
    return compat.find("create_production_ring_attention")([16, 32], [1, 2], **fields)


def test_out_of_memory_is_repeated_in_query_chunks_with_the_same_bits(monkeypatch, caplog):
    query, key, value = tensors(tokens=100)
    module = production_module()
    wanted = module(query, key, value, is_causal=True)
    monkeypatch.setattr(build, "_LAST_CHUNK", 8)
    whole, chunks = lt.DilatedAttention.forward, []

    def fails(self, *args, **kwargs):
        raise MemoryError("no room")

    def attention(part, *rest, **options):
        if part.shape[1] > 30:
            raise torch.OutOfMemoryError("no room")
        chunks.append(part.shape[1])
        return whole_attention(part, *rest, **options)

    whole_attention = lt.attention
    monkeypatch.setattr(lt.DilatedAttention, "forward", fails)
    monkeypatch.setattr(lt, "attention", attention)
    query.requires_grad_()
    out = module(query, key, value, is_causal=True)
    assert torch.equal(out, wanted) and chunks == [25, 25, 25, 25]
    assert module.recoveries == 1 == module.monitor.recoveries and "query chunks" in caplog.text
    out.sum().backward()
    grad, query.grad = query.grad, None
    monkeypatch.setattr(lt.DilatedAttention, "forward", whole)
    module(query, key, value, is_causal=True).sum().backward()
    assert torch.allclose(grad, query.grad, atol=1e-6)

    monkeypatch.setattr(lt.DilatedAttention, "forward", fails)
    with pytest.raises(MemoryError):
        production_module(enable_error_recovery=False)(query, key, value)


def test_a_local_ring_that_fails_is_repeated_once(monkeypatch):
    query, key, value = tensors()
    module = production_module(ring_size=2)
    wanted, whole, calls = module(query, key, value), lt.RingDilatedAttention._over_ring, []

    def fails_once(self, *args):
        calls.append(1)
        if len(calls) == 1:
            raise longspan.CommError("a message was lost")
        return whole(self, *args)

    monkeypatch.setattr(lt.RingDilatedAttention, "_over_ring", fails_once)
    assert torch.equal(module(query, key, value), wanted) and module.recoveries == 1
    monkeypatch.setattr(build.Compatible, "_over_group", lambda self: True)
    calls.clear()
    with pytest.raises(longspan.CommError):
        module(query, key, value)


def test_scale_checkpointing_and_log_of_the_production_ring(caplog):
    query, key, value = tensors()
    module = production_module(attention_scale=0.1, log_memory_usage=True, use_gradient_checkpointing=False)
    assert module.use_checkpointing is False
    with caplog.at_level(logging.INFO, "longspan.memory"):
        out = module(query, key, value)
    assert torch.equal(out, lt.DilatedAttention(**LISTS, softmax_scale=0.1)(query, key, value))
    assert "workspace_bytes" in caplog.text


def test_without_a_memory_pool_workspace_goes_back_after_each_call():
    query, key, value = tensors(tokens=512)
    production_module(use_memory_pool=False)(query, key, value)
    assert longspan.host_memory.statistics()["reserved_bytes"] == 0


def test_clearing_the_cache_of_a_ring_gives_workspace_back():
    module = lt.RingDilatedAttention(**LISTS, ring_size=2)
    module(*tensors(tokens=512))
    assert longspan.host_memory.statistics()["reserved_bytes"] > 0
    module.clear_cache()
    assert longspan.host_memory.statistics()["reserved_bytes"] == 0


def test_activation_checkpointing_recomputes_in_backward():
    torch.manual_seed(0)
    module = compat.find("RingDistributedDilatedAttention")(32, 4, **LISTS, activation_checkpointing=True)
    runs = []
    module.q_proj.register_forward_hook(lambda *_: runs.append(1))
    x = torch.randn(1, 40, 32, requires_grad=True)
    module(x, x, x)[0].sum().backward()
    assert len(runs) == 2 and x.grad is not None


# ---- configs and factories


def test_configs_check_their_fields():
    with pytest.raises(AssertionError):
        compat.find("RingAttentionConfig")([16, 32], [1])
    with pytest.raises(ValueError, match="must have the same length"):
        from longspan.compat.dilated_attention_pytorch.configs import DilatedAttentionConfig

        DilatedAttentionConfig([16, 32], [1])


@ignore_warnings
def test_factories_make_the_classes_of_this_package_and_take_registered_ones():
    module = compat.create_multihead_dilated_attention("standard", 32, 4, [16, 32], [1, 2], bias=False, dropout=0.25)
    assert type(module).__name__ == "MultiheadDilatedAttention" and module.q_proj.bias is None
    assert module.multihead_config.bias is False and module.attention_config.dropout == 0.25
    sparse = compat.create_block_sparse_attention(0.75, "random", 32, 4, segment_lengths=[16, 32], dilation_rates=[1, 2])
    assert sparse.attention.density == 0.25

    from longspan.compat.dilated_attention_pytorch.bases import BaseDilatedAttention
    from longspan.compat.dilated_attention_pytorch.factories import _ATTENTION_REGISTRY, register_attention

    class Own(BaseDilatedAttention):
        def forward(self, q, k, v, is_causal=False, attention_mask=None):
            return q

    register_attention("own", Own)
    try:
        assert compat.create_dilated_attention("own", [16], [1]).config.segment_lengths == [16]
    finally:
        del _ATTENTION_REGISTRY["own"]
    with pytest.raises(ValueError, match="Unknown attention type"):
        compat.create_dilated_attention("own")
    assert isinstance(module.attention, torch.nn.Module) and issubclass(compat.find("DilatedAttention"), BaseDilatedAttention)


def test_adaptive_factory_learns_its_blocks():
    module = compat.create_adaptive_sparse_attention(32, 4, segment_lengths=[16, 32], dilation_rates=[1, 2])
    x = torch.randn(1, 256, 32)
    module(x, x, x).sum().backward()
    assert module.attention.learned.importance_scorer.query[0].grad.abs().sum() > 0


def test_sparse_patterns_are_saved_and_loaded(tmp_path):
    from longspan.compat.dilated_attention_pytorch import patterns

    made = patterns.SparsePatternGenerator(compat.find("PatternConfig")(block_size=16)).generate_pattern(256, 2)
    for compress in (True, False):
        path = str(tmp_path / f"pattern{compress}")
        patterns.save_sparse_pattern(made, path, compress)
        assert torch.equal(patterns.load_sparse_pattern(path), made)
    (tmp_path / "other").write_bytes(pickle.dumps({"pattern": 1}))
    with pytest.raises(longspan.InvalidArgument, match="save_sparse_pattern"):
        patterns.load_sparse_pattern(str(tmp_path / "other"))


# ---- installation


def test_install_puts_the_forks_modules_and_names_in_place(installed):
    installed()
    import dilated_attention_pytorch
    from dilated_attention_pytorch.core.config import RingAttentionConfig
    from dilated_attention_pytorch.ring_dilated_attention_production import RingAttentionConfig as Production

    assert RingAttentionConfig is not Production is dilated_attention_pytorch.RingAttentionConfig
    assert dilated_attention_pytorch.RingDilatedAttention is dilated_attention_pytorch.RingDilatedAttentionV2Collective
    for name in dilated_attention_pytorch.__all__:
        assert getattr(dilated_attention_pytorch, name) is not None
    compat.uninstall()
    assert "dilated_attention_pytorch" not in sys.modules


def test_fkodoms_flavour_returns_pairs(installed):
    installed("fkodom")
    from dilated_attention_pytorch.dilated_attention import MultiheadDilatedAttention
    from dilated_attention_pytorch.long_net import LongNetLM

    x = torch.randn(1, 40, 32)
    out, weights = MultiheadDilatedAttention(32, 4, [1, 2], [16, 32])(x, x, x, True)
    assert out.shape == x.shape and weights is None and LongNetLM is lt.LongNetLM
    with pytest.raises(longspan.InvalidArgument, match="flavour"):
        installed("other")


def test_nothing_is_loaded_before_it_is_asked_for():
    code = "import sys, longspan.torch; assert not [m for m in sys.modules if 'compat' in m and 'longspan' in m]; " \
        "assert 'longspan.torch.adaptive' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_prints_the_table_and_the_page_is_what_it_prints():
    printed = subprocess.run([sys.executable, "-m", "longspan.compat"], check=True, capture_output=True, text=True).stdout
    assert all(f"### {row.name}\n" in printed for row in EVERY)
    one = subprocess.run([sys.executable, "-m", "longspan.compat", "DilatedAttention"], check=True, capture_output=True, text=True).stdout
    assert one.startswith("### DilatedAttention\n") and one in printed
    page = Path(__file__).parents[2] / "docs" / "arguments.md"
    if page.exists():  # not beside an installed wheel
        assert page.read_text().endswith(printed), "python -m longspan.compat > the page, under its heading"
