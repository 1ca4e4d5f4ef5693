"""Rivals of KnapSpec as planners for the same generate()."""

from rivals.baselines import METHODS, make_planner

__all__ = ["METHODS", "make_planner"]
