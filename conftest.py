"""pytest's plugins may have imported cProfile, and with it Python's own `profile`, before this folder was on the path."""

import sys

if not hasattr(sys.modules.get("profile"), "LatencyModel"):
    sys.modules.pop("profile", None)
