"""profile.py: the fit finds known costs, a stored profile is used only where it fits, and Python's own profile lives on.

A saved latency profile of another device, dtype, model or thread count ->
test_a_stored_profile_is_used_again and test_a_profile_of_something_else_is_not_used.
"""

import cProfile
import dataclasses
import itertools
import json
import math
import profile
import pstats
import subprocess
import sys
from pathlib import Path
from profile import LatencyModel, fit, latency_model, measure

import pytest
import torch

from tests.testing_models import random_model, tiny_config

FOLDER = Path(__file__).parent.parent
L = 5
ATTENTION, MLP = frozenset(range(0, 2 * L, 2)), frozenset(range(1, 2 * L, 2))
TRUE = LatencyModel(2e-3, 7e-4, (3e-4, 2e-7), ((1, 7e-3, 1e-6), (3, 8e-3, 1.5e-6), (5, 1.2e-2, 2e-6)), 0.0)


def timings(latency):
    """What measure() would time on a machine that costs exactly this."""
    times = {}
    for n in (64, 1000, 2000):
        times |= {(skip, 1, n): latency.draft(skip, n, L) for skip in (ATTENTION, MLP, ATTENTION | MLP)}
        times |= {(frozenset(), k, n): latency.verify(n, k) for k, *_ in latency.verify_s if k > 1}
        times[frozenset(), 1, n] = latency.draft(frozenset(), n, L)
    return times


def test_the_fit_recovers_known_costs():
    fitted = fit(timings(TRUE), L)
    assert fitted.head() == pytest.approx(TRUE.head(), rel=1e-6)
    assert fitted.mlp() == pytest.approx(TRUE.mlp(), rel=1e-6)
    assert fitted.attention_s == pytest.approx(TRUE.attention_s, rel=1e-6)
    assert fitted.verify(1500, 3) == pytest.approx(TRUE.verify(1500, 3), rel=1e-6)
    assert fitted.error < 1e-9


def test_the_error_of_the_fit_is_the_mean_relative_residual():
    times = timings(TRUE)
    noisy = {run: seconds * (1.1 if i % 2 else 0.9) for i, (run, seconds) in enumerate(times.items())}
    fitted = fit(noisy, L)
    residuals = [abs((fitted.verify(n, k) if k > 1 else fitted.draft(skip, n, L)) / s - 1)
                 for (skip, k, n), s in noisy.items()]  # fmt: skip
    residuals += [abs(fitted.verify(n, 1) / s - 1) for (skip, k, n), s in noisy.items() if k == 1 and not skip]
    assert fitted.error == pytest.approx(sum(residuals) / len(residuals), rel=1e-6)
    assert 0.01 < fitted.error < 0.1


def test_no_cost_is_negative_where_noise_says_so():
    times = {run: seconds * (1 - run[2] / 4000) for run, seconds in timings(TRUE).items()}  # the longer the cheaper
    fitted = fit(times, L)
    assert fitted.attention_s[1] == 0 and fitted.attention_s[0] > 0
    assert all(a >= 0 and b >= 0 for _, a, b in fitted.verify_s)


def test_verification_is_interpolated_between_the_measured_lengths():
    assert TRUE.verify(1000, 3) == pytest.approx(9.5e-3)
    assert TRUE.verify(1000, 4) == pytest.approx((TRUE.verify(1000, 3) + TRUE.verify(1000, 5)) / 2)
    assert TRUE.verify(1000, 7) == pytest.approx(2 * TRUE.verify(1000, 5) - TRUE.verify(1000, 3))


def test_a_draft_costs_its_head_and_what_it_keeps():
    assert TRUE.draft(frozenset(range(2 * L)), 1000, L) == TRUE.head()
    assert TRUE.draft({0, 2, 3}, 1000, L) == pytest.approx(2e-3 + 3 * 5e-4 + 4 * 7e-4)
    assert [TRUE.sublayer(item, 1000) for item in (0, 1)] == pytest.approx([5e-4, 7e-4])


@pytest.mark.parametrize("gamma_max", [0, 3])
def test_measuring_a_tiny_model_gives_finite_positive_times(gamma_max):
    model = random_model()
    latency = measure(model, context_lengths=[8, 64], gamma_max=gamma_max)
    assert [k for k, *_ in latency.verify_s] == ([1] if gamma_max == 0 else [1, 4])
    prices = [latency.head(), latency.draft(frozenset(), 32, 3), *(latency.verify(32, k + 1) for k in range(gamma_max + 1))]
    assert all(0 < price < 10 for price in prices)
    assert math.isfinite(latency.error)


# --- The stored profile ----------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The calls of measure(), which is replaced: its answer tells which call it was."""
    calls = []

    def stand_in(model, **options):
        calls.append(options)
        return dataclasses.replace(TRUE, error=float(len(calls)))

    monkeypatch.setattr(profile, "measure", stand_in)
    monkeypatch.setattr(profile, "cache_folder", lambda: tmp_path / "cache")
    return calls


def stored_file(tmp_path):
    (path,) = (tmp_path / "cache" / "profiles").iterdir()
    return path


def test_a_stored_profile_is_used_again(measured, tmp_path):
    first = latency_model(random_model(), context=100, gamma_max=4)
    assert latency_model(random_model(), context=300, gamma_max=4) == first  # up to 512 is one range
    assert len(measured) == 1
    assert json.loads(stored_file(tmp_path).read_text())["latency"]["error"] == 1.0


@pytest.mark.parametrize("change", ["model", "dtype", "threads", "device", "torch", "gamma_max", "context"])
def test_a_profile_of_something_else_is_not_used(measured, monkeypatch, change):
    options = {"context": 100, "gamma_max": 4}
    latency_model(random_model(tiny_config(max_position=4096)), **options)
    model = random_model(tiny_config(max_position=4096, n_layer=2 if change == "model" else 3),
                         dtype=torch.bfloat16 if change == "dtype" else torch.float32)  # fmt: skip
    if change == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    if change == "device":
        monkeypatch.setattr(profile, "device_name", lambda device: "another processor")
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "0.0")
    options |= {"gamma_max": {"gamma_max": 5}, "context": {"context": 600}}.get(change, {})
    assert latency_model(model, **options).error == 2.0
    assert len(measured) == 2


@pytest.mark.parametrize("damage", ["", "[]", "{}", "truncated", '"head_s": NaN', '"head_s": -1', '"head_s": null', '"verify_s": []',
                                    '"verify_s": [[Infinity, 1, 1]]', '"attention_s": [1]'])  # fmt: skip
def test_a_damaged_profile_is_measured_anew_and_replaced(measured, tmp_path, damage):
    model = random_model()
    latency_model(model, context=100, gamma_max=4)
    path = stored_file(tmp_path)
    text = path.read_text()
    if damage == "truncated":
        path.write_text(text[: len(text) // 2])
    elif damage.startswith('"'):
        stored = json.loads(text)
        stored["latency"] |= json.loads("{" + damage + "}")
        path.write_text(json.dumps(stored))
    else:
        path.write_text(damage)
    assert latency_model(model, context=100, gamma_max=4).error == 2.0
    assert latency_model(model, context=100, gamma_max=4).error == 2.0
    assert len(measured) == 2
    assert stored_file(tmp_path) == path


def test_a_cache_that_cannot_be_written_is_done_without(measured, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(profile, "cache_folder", lambda: tmp_path / "file")
    assert [latency_model(random_model(), context=100, gamma_max=4).error for _ in range(2)] == [1.0, 2.0]


@pytest.mark.parametrize(("context", "max_position"), list(itertools.product([1, 100, 512, 513, 4000], [8, 512, 4096])))
def test_measured_contexts_reach_as_far_as_decoding_and_no_further_than_the_model(measured, context, max_position):
    context = min(context, max_position)
    latency_model(random_model(tiny_config(max_position=max_position)), context=context, gamma_max=3)
    lengths = measured[0]["context_lengths"]
    assert 1 <= lengths[0] and lengths[-1] + 4 <= max(max_position, 5)
    assert lengths[-1] + 4 >= min(context, max_position)


# --- Python's own profile --------------------------------------------------------------------------------------------


def run_python(*arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_this_module_hands_on_pythons_own_profile():
    assert profile.Profile.__module__ != "profile"
    assert profile.Profile().calibrate  # a method of the library's class
    with pytest.raises(AttributeError):
        profile.no_such_name  # noqa: B018, it is the access that must fail
    profiler = cProfile.Profile()
    assert profiler.runcall(sorted, [2, 1]) == [1, 2]
    assert pstats.Stats(profiler).total_calls >= 1


def test_cprofile_and_torch_compile_can_be_imported_in_this_folder():
    code = "import cProfile, torch._dynamo, profile; print(profile.LatencyModel.__name__, cProfile.Profile.__name__)"
    assert run_python("-c", code).split() == ["LatencyModel", "Profile"]


def test_cprofile_can_profile_the_command_line():
    output = run_python("-m", "cProfile", "-s", "tottime", "knapspec.py", "--version")
    assert output.startswith("knapspec ") and "function calls" in output


def test_tests_run_where_a_plugin_has_imported_pythons_own_profile():
    code = f"""
import sys
sys.path = [path for path in sys.path if path not in ("", {str(FOLDER)!r})]
import cProfile, profile, pytest
assert not hasattr(profile, "LatencyModel")
sys.exit(pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "tests/test_profile.py"]))
"""
    assert "test_the_fit_recovers_known_costs" in run_python("-c", code)


def test_prices_never_fall_as_tokens_grow_whatever_was_measured():
    noisy = LatencyModel(1e-3, 1e-3, (1e-3, 0.0), ((1, 9e-3, 0.0), (5, 10.5e-3, 0.0), (9, 10.0e-3, 0.0)), 0.1)
    prices = [noisy.verify(100, k) for k in range(1, 300)]
    assert prices == sorted(prices) and prices[0] == 9e-3 and prices[8] == prices[-1] == 10.5e-3


def test_the_profile_of_a_model_with_edited_or_graphed_sublayers_is_another(monkeypatch, tmp_path):
    """Whatever is timed is part of the name under which a profile is kept: the code beyond the paper, and CUDA graphs."""
    monkeypatch.setenv("KNAPSPEC_CACHE", str(tmp_path))
    model = random_model()
    latency_model(model, context=8, gamma_max=0)
    model.sublayers = [lambda x, context, f=f: f(x, context) for f in model.sublayers]
    latency_model(model, context=8, gamma_max=0)
    assert len(list(tmp_path.glob("profiles/*.json"))) == 2
