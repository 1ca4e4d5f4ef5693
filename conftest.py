"""For all tests. pytest's plugins may have imported cProfile, and with it Python's own `profile`, before this folder was on the path."""

import sys

import pytest

if not hasattr(sys.modules.get("profile"), "LatencyModel"):
    sys.modules.pop("profile", None)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Matrices as small as the tests' are not worth a second thread: it would only be waited for."""
    import torch  # not before Python's own `profile` is gone

    torch.set_num_threads(1)
