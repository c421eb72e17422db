"""Decoding equals the full forward at every position, keeps no more than the pattern needs, and samples as asked."""

import copy
import pickle

import pytest

import longspan

torch = pytest.importorskip("torch")

import longspan.torch as lt
from longspan.torch.sampling import Sampler
from test_longnet import shaken, small_lm

PATTERNS = {
    "short segments": ([8, 16, 7], [1, 2, 3]),
    "longer than the sequence": ([16, 64, 4096], [1, 4, 8]),
    "lists swapped": ([1, 2, 4], [8, 16, 32]),
    "one branch": ([12], [1]),
}
# float64 runs the reference kernel: what differs is the order of sums, some hundred of them.
EXACT = dict(atol=1e-12, rtol=1e-10)


def chunks(total, sizes):
    """Chunk sizes in turn, until total."""
    result, index = [], 0
    while sum(result) < total:
        result.append(min(sizes[index % len(sizes)], total - sum(result)))
        index += 1
    return result


@pytest.mark.filterwarnings("ignore:.*Were the lists swapped")
@pytest.mark.parametrize("sizes", [[1], [5], [19, 1, 2], [200]], ids=str)
@pytest.mark.parametrize("case", PATTERNS)
def test_cache_equals_the_full_attention(case, sizes):
    torch.manual_seed(0)
    segments, rates = PATTERNS[case]
    module = lt.DilatedAttention(segments, rates, softmax_scale=0.3)
    query, key, value = (torch.randn(2, 100, 5, 4, dtype=torch.float64) for _ in range(3))
    want = module(query, key, value, is_causal=True)
    cache = lt.DilatedCache(module, heads=5)
    for size in chunks(100, sizes):
        part = slice(cache.position, cache.position + size)
        out = cache.attend(query[:, part], key[:, part], value[:, part])
        torch.testing.assert_close(out, want[:, part], **EXACT)
    assert cache.position == 100


LONGNET = {
    "paper": longspan.longnet([8, 16, 40], [1, 2, 5]),
    "torchscale": longspan.longnet([8, 16, 40], [1, 2, 5], phase="torchscale", pad_keys=True),
    "more phases than heads": longspan.longnet([16, 64], [3, 9]).with_output_scale(0.7),
    "one branch": longspan.longnet([12], [4]),
    "dense": longspan.dense(),
    "groups": longspan.dilated([8, 16], [1, 2]),
}


@pytest.mark.parametrize("sizes", [[1], [19, 1, 2], [100]], ids=str)
@pytest.mark.parametrize("case", LONGNET)
def test_cache_of_a_pattern_equals_its_full_attention(case, sizes):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 100, 5, 4, dtype=torch.float64) for _ in range(3))
    want = lt.attention(query, key, value, LONGNET[case], causal=True, scale=0.4)
    cache = lt.DilatedCache(LONGNET[case], heads=5, scale=0.4)
    for size in chunks(100, sizes):
        part = slice(cache.position, cache.position + size)
        out = cache.attend(query[:, part], key[:, part], value[:, part])
        torch.testing.assert_close(out, want[:, part], **EXACT)


def test_branches_of_16_bits_are_mixed_in_32():
    query, key, value = (torch.randn(1, 50, 4, 16).bfloat16() for _ in range(3))
    want = lt.attention(query, key, value, LONGNET["paper"], causal=True).float()
    cache = lt.DilatedCache(LONGNET["paper"], heads=4)
    out = torch.cat([cache.attend(*(x[:, i : i + 1] for x in (query, key, value))) for i in range(50)], dim=1)
    # Both round an exact result to 8 bits; intermediate ones, of at most three branches, are rounded to 8 bits, too.
    assert out.dtype is torch.bfloat16 and (out.float() - want).abs().max() < 2 * 2**-8 * want.abs().max()


def test_a_step_needs_no_plan_of_its_own():
    module = lt.DilatedAttention([64, 256], [1, 4])
    cache, row = lt.DilatedCache(module, heads=2), torch.randn(1, 1, 2, 8)
    before = longspan.plan_cache.statistics()["misses"]
    for _ in range(300):
        cache.attend(row, row, row)
    # One for each amount of memory that a branch had: 64 rows at once, at most two more doublings.
    assert longspan.plan_cache.statistics()["misses"] - before <= 4


def test_a_step_is_one_call_of_compiled_code(monkeypatch):
    """Where torch has the exchange API; and the way without it gives the same."""
    from longspan.torch import cache as module, operator

    if operator._calls is operator._RawCalls:
        pytest.skip("torch has no DLPack exchange API")
    query, key, value = (torch.randn(2, 40, 4, 8) for _ in range(3))
    results = []
    for left_out in ("attention_of_first_rows", "step_of_cache"):
        with monkeypatch.context() as patch:
            patch.setattr(module, left_out, lambda *arguments: None)
            cache = lt.DilatedCache(LONGNET["paper"], heads=4)
            cache.append(key[:, :20], value[:, :20])
            cache.reserve(40)
            steps = [cache.attend(*(x[:, i : i + 1] for x in (query, key, value))) for i in range(20, 40)]
        results.append(torch.cat(steps, dim=1))
    torch.testing.assert_close(*results, atol=1e-6, rtol=0)


def test_a_captured_position_beyond_the_memory_writes_nowhere():
    """Replays of a graph are not counted on the host, so the memory has to guard itself."""
    cache, row = lt.DilatedCache(longspan.dense(), heads=2), torch.ones(1, 1, 2, 8)
    cache.append(row, row)
    room = cache._rows.shape[4] - 1
    cache._counts[0] = room + 5
    before = cache._rows.clone()
    assert cache.attend(row, row, row).eq(0).all()
    torch.testing.assert_close(cache._rows[:, :, :, :, 1:], before[:, :, :, :, 1:], atol=0, rtol=0, equal_nan=True)


def test_what_an_earlier_segment_held_is_gone():
    module = lt.DilatedAttention([32], [1])
    rows = torch.randn(1, 96, 2, 8)
    rows[:, 20:32] = torch.nan
    cache = lt.DilatedCache(module, heads=2)
    out = torch.cat([cache.attend(*[rows[:, i : i + 1]] * 3) for i in range(96)], dim=1)
    assert out[:, 20:32].isnan().any() and out[:, 32:].isfinite().all()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_of_a_cache_goes_on_alone(copied):
    query, key, value = (torch.randn(2, 100, 5, 4, dtype=torch.float64) for _ in range(3))
    want = lt.attention(query, key, value, LONGNET["paper"], causal=True)
    cache = lt.DilatedCache(LONGNET["paper"], heads=5)
    cache.append(key[:, :30], value[:, :30])
    for _ in range(2):  # of the original again, which the copy has not changed
        other = copied(cache)
        for i in range(30, 100):
            out = other.attend(*(x[:, i : i + 1] for x in (query, key, value)))
            torch.testing.assert_close(out, want[:, i : i + 1], **EXACT)
    assert cache.position == 30 and other.position == 100


def test_joined_caches_take_tokens_at_positions_of_their_own():
    query, key, value = (torch.randn(3, 90, 5, 4, dtype=torch.float64) for _ in range(3))
    module, starts = lt.DilatedAttention([8, 16, 64], [1, 2, 3]), (70, 1, 33)
    want = module(query, key, value, is_causal=True)
    alone = [lt.DilatedCache(module, heads=5) for _ in starts]
    for entry, (cache, start) in enumerate(zip(alone, starts)):
        cache.append(key[entry : entry + 1, :start], value[entry : entry + 1, :start])
    cache = lt.DilatedCache.joined(alone)
    for size in (1, 1, 3, 1):
        at = cache.position
        assert at == [start + at[0] - 70 for start in starts]
        rows = [torch.stack([x[entry, p : p + size] for entry, p in enumerate(at)]) for x in (query, key, value)]
        out = cache.attend(*rows)
        for entry, position in enumerate(at):
            torch.testing.assert_close(out[entry], want[entry, position : position + size], **EXACT)


@pytest.mark.parametrize("case", ["paper", "groups"])
def test_empty_batches_and_no_tokens_are_taken(case):
    for shape in ((0, 1, 5, 4), (0, 7, 5, 4), (2, 0, 5, 4)):
        cache, rows = lt.DilatedCache(LONGNET[case], heads=5), torch.randn(shape)
        for _ in range(2):
            assert cache.attend(rows, rows, rows).shape == shape
        assert cache.position == 2 * shape[1]


def test_a_cache_with_room_keeps_its_memory():
    cache, row = lt.DilatedCache(lt.DilatedAttention([64, 4096], [1, 2]), heads=2), torch.randn(1, 1, 2, 8)
    with pytest.raises(longspan.InvalidArgument, match="after the first tokens"):
        cache.reserve(10)
    cache.attend(row, row, row)
    cache.reserve(3000)
    before = cache.bytes
    cache.append(*[torch.randn(1, 2999, 2, 8)] * 2)
    assert cache.bytes == before
    cache.append(*[torch.randn(1, 1000, 2, 8)] * 2)
    assert cache.bytes > before


def test_appended_rows_are_seen_by_later_ones():
    torch.manual_seed(0)
    module = lt.DilatedAttention([16, 32], [1, 2])
    query, key, value = (torch.randn(1, 60, 4, 8, dtype=torch.float64) for _ in range(3))
    cache = lt.DilatedCache(module, heads=4)
    cache.append(key[:, :43], value[:, :43])
    out = cache.attend(query[:, 43:], key[:, 43:], value[:, 43:])
    torch.testing.assert_close(out, module(query, key, value, is_causal=True)[:, 43:], **EXACT)


def test_memory_is_bounded_by_the_pattern():
    segments, rates = [64, 256, 100], [1, 4, 3]
    cache = lt.DilatedCache(lt.DilatedAttention(segments, rates), heads=4)
    rows = torch.randn(2, 1, 4, 8)
    seen = []
    for _ in range(1000):
        cache.attend(rows, rows, rows)
        seen.append(cache.bytes)
    # Every head has as many rows as the longest strand (64, 64 and 33 here), and one for what is in none.
    most = 2 * 2 * 8 * 4 * 4 * (64 + 1)
    assert seen[-1] == most and max(seen) == most
    assert seen[63:] == seen[63:64] * len(seen[63:])
    cache.reset()
    assert cache.bytes == 0 and cache.position == 0


@pytest.mark.parametrize("kind", ["xpos", "rotary", "none"])
@pytest.mark.parametrize("sizes", [[1], [17, 1, 3]], ids=str)
def test_decoding_equals_the_full_forward_at_every_position(sizes, kind):
    model = shaken(small_lm(kind, dropout=0.1).double()).eval()
    ids = torch.randint(50, (3, 45))
    want = model(ids)
    cache = model.new_cache(45 if kind == "xpos" else None)
    for size in chunks(45, sizes):
        part = slice(cache.position, cache.position + size)
        logits = model.decode(ids[:, part], cache)
        torch.testing.assert_close(logits, want[:, part], atol=1e-10, rtol=1e-9)


def test_decoding_in_float32_and_autocast():
    model = shaken(small_lm(), 0.1)
    ids = torch.randint(50, (2, 40))
    for low, tolerance in ((False, 1e-5), (True, 0.05)):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            want = model(ids).float()
            cache = model.new_cache(40)
            got = torch.cat([model.decode(part, cache) for part in ids.split(9, dim=1)], dim=1).float()
        torch.testing.assert_close(got, want, atol=tolerance * want.abs().max().item(), rtol=0)


@pytest.mark.parametrize("kind", ["xpos", "rotary"])
def test_greedy_generation_is_the_full_forwards(kind):
    model = shaken(small_lm(kind).double())
    ids = torch.randint(50, (3, 11))
    new = 25
    result = model.generate(ids, new, temperature=0, prefill_chunk=4)
    assert result.shape == (3, 36) and torch.equal(result[:, :11], ids)
    logits = model(result)  # of the final length, which xpos depends on
    assert torch.equal(result[:, 11:], logits[:, 10:-1].argmax(-1))
    assert torch.equal(result, model.generate(ids, new, temperature=0))
    assert model.training


@pytest.mark.parametrize("kind", ["xpos", "rotary", "none"])
def test_prompts_of_different_lengths_are_continued_as_if_alone(kind):
    model = shaken(small_lm(kind).double())
    ids, prompts, new = torch.randint(50, (4, 21)), [21, 1, 13, 13], 15
    got = model.generate(ids, new, temperature=0, prefill_chunk=5, lengths=prompts)
    assert got.shape == (4, 36)
    for entry, length in enumerate(prompts):
        alone = model.generate(ids[entry : entry + 1, :length], new, temperature=0)
        assert torch.equal(got[entry, : length + new], alone[0]) and not got[entry, length + new :].any()
    assert torch.equal(got, model.generate(ids, new, temperature=0, lengths=torch.tensor(prompts)))
    for count in (0, 3):  # as long as the longest prompt asks for, not as ids is
        short = model.generate(ids, count, temperature=0, lengths=[9, 1, 7, 7])
        assert short.shape == (4, 9 + count) and torch.equal(short[0, :9], ids[0, :9]) and not short[1, 1 + count :].any()
    end = int(got[1, 4])  # the entry with the shortest prompt ends here at the latest
    ended = model.generate(ids, new, temperature=0, lengths=prompts, end_token=end)
    first = got[1].tolist().index(end, 1)
    assert torch.equal(ended[1, : first + 1], got[1, : first + 1]) and ended[1, first:].eq(end).all()
    for wrong in ([21, 1], [0, 1, 2, 3], [22, 1, 1, 1], [1.5, 1, 1, 1]):
        with pytest.raises(longspan.InvalidArgument, match="lengths") as error:
            model.generate(ids, new, lengths=wrong)
        assert error.value.argument == "lengths"


def test_generation_repeats_with_its_seed():
    model = shaken(small_lm(dropout=0.2))
    ids = torch.randint(50, (2, 5))
    draws = [model.generate(ids, 12, seed=seed) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append(model.generate(ids, 12))
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    assert torch.equal(model.generate(ids, 0), ids)
    assert torch.equal(model.generate(ids.int(), 3, seed=1), model.generate(ids, 3, seed=1).int())


def test_generation_stops_at_the_end_token():
    model = shaken(small_lm("rotary"))
    ids = torch.randint(50, (4, 5))
    free = model.generate(ids, 20, seed=3)[:, 5:]
    end = int(free[0, 3])
    first = [row.tolist().index(end) if end in row.tolist() else 20 for row in free]
    got = model.generate(ids, 20, seed=3, end_token=end)[:, 5:]
    assert got[0, first[0] :].eq(end).all() and torch.equal(got[0, : first[0]], free[0, : first[0]])
    model.out.bias.data[end] = 1e4
    assert model.generate(ids, 20, end_token=end).shape == (4, 6)


def test_sampling():
    logits = torch.tensor([[2.0, 0.0, 1.0, -1.0], [0.0, 3.0, 3.0, 0.0]])
    cpu = torch.device("cpu")
    torch.testing.assert_close(Sampler(2.0, None, None, None, cpu).probabilities(logits), (logits / 2).softmax(-1))
    kept = Sampler(1.0, 2, None, None, cpu).probabilities(logits)
    assert (kept > 0).tolist() == [[True, False, True, False], [False, True, True, False]]
    torch.testing.assert_close(kept[0, 0] / kept[0, 2], torch.tensor(1.0).exp())
    # softmax of the first row: 0.64, 0.09, 0.24, 0.03
    for limit, count in ((0.5, 1), (0.65, 2), (0.9, 3), (1.0, 4)):
        kept = Sampler(1.0, None, limit, None, cpu).probabilities(logits)
        assert (kept[0] > 0).sum() == count
        torch.testing.assert_close(kept.sum(-1), torch.ones(2))
    assert Sampler(0, None, None, None, cpu)(logits).tolist()[0] == 0
    draw = Sampler(1.0, None, None, 5, cpu)
    counts = torch.bincount(torch.cat([draw(logits[:1]) for _ in range(4000)]), minlength=4) / 4000
    # Four standard errors of a share of 0.64 in 4000 draws.
    torch.testing.assert_close(counts, logits[0].softmax(-1), atol=0.031, rtol=0)


def test_bad_calls_are_refused_by_name():
    model = small_lm()
    ids = torch.randint(50, (2, 5))
    for arguments, name in (
        (dict(max_new_tokens=-1), "max_new_tokens"),
        (dict(max_new_tokens=2, temperature=-1), "temperature"),
        (dict(max_new_tokens=2, temperature=float("nan")), "temperature"),
        (dict(max_new_tokens=2, top_k=0), "top_k"),
        (dict(max_new_tokens=2, top_p=0.0), "top_p"),
        (dict(max_new_tokens=2, top_p=1.5), "top_p"),
        (dict(max_new_tokens=2, seed="x"), "seed"),
        (dict(max_new_tokens=2, prefill_chunk=0), "prefill_chunk"),
    ):
        with pytest.raises(longspan.InvalidArgument, match=name) as error:
            model.generate(ids, **arguments)
        assert error.value.argument == name
    with pytest.raises(longspan.InvalidArgument, match="ids has no tokens"):
        model.generate(ids[:, :0], 3)
    with pytest.raises(longspan.InvalidArgument, match="length is None"):
        model.new_cache()
    cache = model.new_cache(6)
    model.decode(ids, cache)
    with pytest.raises(longspan.InvalidArgument, match="final length"):
        model.decode(ids, cache)
    with pytest.raises(longspan.InvalidArgument, match="batch 2"):
        model.decode(ids[:1, :1], cache)
    with pytest.raises(longspan.InvalidArgument, match="another model"):
        small_lm().decode(ids, model.new_cache(6))
    with pytest.raises(longspan.InvalidArgument, match="eval"):
        small_lm(dropout=0.1).decode(ids, small_lm(dropout=0.1).new_cache(6))
    with pytest.raises(longspan.InvalidArgument, match="heads = 4"):
        lt.DilatedCache(lt.DilatedAttention([8], [1]), 4).attend(*[torch.zeros(1, 1, 3, 8)] * 3)
    with pytest.raises(longspan.InvalidArgument, match="at least one head"):
        lt.DilatedCache(lt.DilatedAttention([8, 16], [1, 2]), 1)
    with pytest.raises(longspan.InvalidArgument, match="module is Linear"):
        lt.DilatedCache(torch.nn.Linear(2, 2), 1)
    with pytest.raises(longspan.InvalidArgument, match="repeat_interleave"):
        lt.DilatedCache(lt.DilatedAttention([8], [1]), 4).attend(torch.zeros(1, 1, 4, 8), *[torch.zeros(1, 1, 2, 8)] * 2)
    for pattern, fix in (
        (longspan.block_sparse("bigbird"), "query_ranges"),
        (longspan.dilated([64], [1]).with_mask(0, longspan.local_window(64)), "query_ranges"),
        (longspan.longnet([8], [1]).with_long_segments("skip"), "clip"),
    ):
        with pytest.raises(longspan.Unsupported, match=fix):
            lt.DilatedCache(pattern, 4)
