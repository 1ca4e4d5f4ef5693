"""How much memory is left: the machine's, or less in a container; and a model that does not fit is refused with numbers."""

import pytest
import torch

import loading
from loading import memory
from loading.memory import free_bytes
from tests.testing_checkpoints import assert_refused, quiet_load, write_folder

CPU = torch.device("cpu")
NO_LIMIT_1 = 9223372036854771712


@pytest.fixture
def machine(tmp_path):
    """A machine with 100 MiB free; machine(group, files) adds /proc/self/cgroup's text and files below /sys/fs/cgroup."""

    def build(groups, **files):
        proc = tmp_path / "proc"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text("MemTotal: 999999 kB\nMemAvailable:  102400 kB\n")
        (proc / "self" / "cgroup").write_text(groups)
        for name, text in files.items():
            path = tmp_path / "cgroup" / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_name(path.name.replace("memory_", "memory.")).write_text(f"{text}\n")
        return free_bytes(CPU, proc=proc, cgroups=tmp_path / "cgroup")

    return build


def test_without_a_limit_the_machine_counts(machine):
    assert machine("0::/\n") == 100 * 2**20


def test_limit_of_version_2_on_the_group_above_counts(machine):
    stat = "anon 5\nactive_file 100\ninactive_file 20\n"
    limited = {"a__memory_max": 5000, "a__memory_current": 3000, "a__memory_stat": stat}
    inner = {"a__b__memory_max": "max", "a__b__memory_current": 2000, "a__b__memory_stat": stat}
    assert machine("0::/a/b\n", **limited, **inner) == 5000 - 3000 + 120


def test_limit_of_version_1_counts(machine):
    stat = "active_file 7\ntotal_active_file 100\ntotal_inactive_file 20\n"
    files = {"memory_limit_in_bytes": 5000, "memory_usage_in_bytes": 3000, "memory_stat": stat}
    files = {f"memory__{name}": text for name, text in files.items()}  # a container sees its own group at the top
    assert machine("3:cpu:/x\n2:hugetlb,memory:/docker/0123\n0::/\n", **files) == 5000 - 3000 + 120


def test_no_limit_of_version_1_is_none(machine):
    files = {"memory_limit_in_bytes": NO_LIMIT_1, "memory_usage_in_bytes": 3000, "memory_stat": ""}
    assert machine("4:memory:/\n", **{f"memory__{name}": text for name, text in files.items()}) == 100 * 2**20


def test_machine_that_does_not_tell(tmp_path):
    assert free_bytes(CPU, proc=tmp_path, cgroups=tmp_path) is None
    assert free_bytes(torch.device("mps")) is None


def test_model_that_does_not_fit_is_refused_before_its_weights_are_fetched(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "m")
    monkeypatch.setattr(memory, "free_bytes", lambda device: 40_000)
    monkeypatch.setattr(loading, "find_tensors", lambda *_: pytest.fail("nothing may be fetched"))
    assert_refused("float32", "0.05 MB", "0.04 MB", "--dtype", call=lambda: quiet_load(folder))
