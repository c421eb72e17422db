"""The ways in which the training step is measured."""

import pytest

torch = pytest.importorskip("torch")

from longspan.bench import language_model as lm
from longspan.bench.timing import busy
from longspan.bench.variants import Variant, prepare
from longspan.torch import multihead, projected


def test_variants_are_read_and_named():
    names = {"eager": "", "layers": "compiled_", "model:captured": "model:captured_", "layers+joint": "layers+joint_"}
    assert {name: Variant.parse(name).prefix for name in names} == names
    both = Variant.parse("model:reduce-overhead+separate")
    assert both == Variant("model", "reduce-overhead", ("separate",))
    assert both.shared == Variant("model", "reduce-overhead") and both.in_graphs
    wrongs = {
        "fast": "scope 'fast'", "layers:fast": "mode 'fast'", "layers+fast": "switch 'fast'",
        "eager:reduce-overhead": "torch.compile",
    }  # fmt: skip
    for wrong, word in wrongs.items():
        with pytest.raises(ValueError, match=word):
            Variant.parse(wrong)


def test_switches_hold_during_a_step_alone(monkeypatch):
    monkeypatch.setattr(lm, "sizes", lambda device: (2, 48, 3))
    seen = []

    def step(model):
        seen.append((projected.FEWEST_ROWS["cpu"], "cpu" in multihead.EAGER_DEVICES))
        return lm.make_step(32, torch.float32, "cpu")(model)

    monkeypatch.setattr(projected, "EAGER_DEVICES", set())
    monkeypatch.setattr(multihead, "EAGER_DEVICES", projected.EAGER_DEVICES)
    before = dict(projected.FEWEST_ROWS), set(projected.EAGER_DEVICES)
    losses = [
        prepare(Variant.parse(f"eager{switches}"), lm.make_model(32, "cpu", "thirds"), step, "cpu")().item()
        for switches in ("", "+joint", "+separate")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0] == pytest.approx(losses[2], abs=1e-5)
    assert seen[::2] == [(4096, False), (0, True), (1 << 62, False)]
    assert before == (projected.FEWEST_ROWS, projected.EAGER_DEVICES)


def test_results_have_both_sides_of_each_variant(monkeypatch):
    monkeypatch.setattr(lm, "sizes", lambda device: (2, 48, 3))
    monkeypatch.setattr(lm, "cpu_peak", lambda *arguments: 1)
    variants = [Variant.parse(name) for name in ("eager", "eager+joint", "eager:captured")]
    result = lm.bench_lm(32, 1, torch.float32, "cpu", variants, "thirds")
    assert set(result["seconds"]) == {"step", "eager+joint_step", "torch_step"}
    assert set(result["failed"]) == {"eager:captured_step", "eager:captured_torch_step"}  # there is no GPU
    assert set(result["times_faster_than_torch"]) == {"step", "eager+joint_step", "best"}
    assert all(value < 1e-5 for value in result["largest_difference"].values())


def test_lines_say_what_was_measured():
    group = {
        "failed": {"model_step": "why"}, "seconds": {"step": {"median": 0.5}, "torch_step": {"median": 1.0}},
        "peak_bytes": {"step": 2e9}, "times_faster_than_torch": {"step": 2.0}, "busy_seconds": {"step": 0.25},
        "kernels": {"step": [["name", 3, 0.125]]},
    }  # fmt: skip
    assert lm.told(group) == [
        "  model_step: why",
        "  step: 500.0 ms, busy 250.0 ms, 2.0 GB, 2.00 times torch's",
        "    125.00 ms    3 x name",
        "  torch_step: 1000.0 ms",
    ]


def test_time_in_which_any_kernel_ran():
    spans = [("b", 30.0, 40.0), ("a", 0.0, 10.0), ("a", 5.0, 12.0), ("c", 6.0, 7.0)]
    result = busy(spans)
    assert result["busy_seconds"] == pytest.approx(22e-6)
    assert [(name, count) for name, count, _ in result["kernels"]] == [("a", 2), ("b", 1), ("c", 1)]
    assert result["kernels"][0][2] == pytest.approx(17e-6)


def test_compiled_variants_keep_their_switches(monkeypatch):
    """Code that was compiled for one variant must not run in another, whichever came first."""
    monkeypatch.setattr(lm, "sizes", lambda device: (2, 48, 3))
    plainly = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, mode: plainly(self, backend="aot_eager"))
    torch._dynamo.reset()
    step = lm.make_step(32, torch.float32, "cpu")
    names = ("layers", "layers+joint", "layers+separate")
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        steps = [prepare(Variant.parse(name), lm.make_model(32, "cpu", "thirds"), step, "cpu") for name in names]
        for name, run in [*zip(names, steps)] * 2:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                run()
            joint = any(event.key == "longspan::strand_linear" for event in profile.key_averages())
            assert joint is (name == "layers+joint")
