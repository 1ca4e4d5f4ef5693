"""The row `rates`: on a simulated machine tokens per time predict what is measured, and another machine's drift is left out."""

import pytest

from benchmark import predictions
from benchmark.bench import Bench
from benchmark.predictions import points_at, worth
from decoding import FixedPlanner, Plan, generate
from tests.testing_benchmark import TEXT, TOKENIZER, L, results, simulated
from tests.testing_models import latency_model


def test_full_prices_predict_a_simulated_machine(monkeypatch):
    costly = latency_model(L, attention_s=(1e-3, 1e-5), head_s=4e-3, per_token=0.3)
    machine = simulated(monkeypatch, "split", epsilon=0.05, latency=costly)
    points = [p for n in (32, 96) for p in points_at(machine, costly, TEXT, n, new_tokens=32)]
    assert len(points) >= 24 and {p["gamma"] for p in points} == {1, 2, 4, 8} and len({tuple(p["skip_set"]) for p in points}) > 3
    pearson, error, ratio_error = worth(points)
    assert pearson > 0.97 and error < 0.06 and ratio_error < 0.06
    for point in points:
        assert point["speedup"] == pytest.approx(point["tokens_per_second"] / point["predicted_plain"], rel=0.02)
    plan = Plan(frozenset(point["skip_set"]), point["gamma"])
    run = generate(machine, TEXT[: point["context"]], max_new_tokens=32, planner=FixedPlanner(plan))
    assert run.accepted / run.drafted <= point["alpha"] <= 1


def of_machine(predicted, speedups):
    """Points of a machine that is a fifth slower than when it was profiled, with predictions that are so many times too high."""
    return [{"predicted_plain": 10.0, "speedup": speedup, "tokens_per_second": 8 * speedup, "predicted": predicted * 10 * speedup}
            for speedup in speedups]  # fmt: skip


def test_rates_leave_the_drift_of_the_machine_out(monkeypatch):
    found = {"smollm2": of_machine(1.05, (1, 2, 4)), "split": of_machine(1.01, (1, 2))}
    monkeypatch.setattr(predictions, "predictions", lambda bench: found)
    row = predictions.rates(None)
    assert row.met and "Pearson 1.000, mean error 5.0%" in row.measured and f"{1.05 / 0.8 - 1:.1%} with the drift" in row.measured
    found["split"] = of_machine(1.11, (1, 2))
    assert not predictions.rates(None).met


def test_predictions_are_made_on_both_models_at_both_lengths(monkeypatch):
    monkeypatch.setattr(predictions, "CONTEXTS", (32, 64))
    monkeypatch.setattr(predictions, "GAMMAS", (1, 4))
    machine, here = simulated(monkeypatch, "split"), Bench(results(), limit=1, max_new_tokens=8, repeats=1)
    monkeypatch.setattr(here, "load", lambda name: (machine, TOKENIZER))
    found = predictions.predictions(here)
    assert {(name, p["context"], p["gamma"]) for name, points in found.items() for p in points} == {
        (name, n, gamma) for name in ("smollm2", "split") for n in (32, 64) for gamma in (1, 4)}  # fmt: skip
    assert list(here.results.data["runs"]) == [f"rates/{name}/{n}" for name in found for n in (32, 64)]
