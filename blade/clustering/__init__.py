# SPDX-License-Identifier: Apache-2.0
"""Grouping of graph nodes into engines; knows no torch, only ints."""

from blade.clustering.cluster import cluster, schedule
from blade.clustering.problem import Clustering, Cost, Dissolved, Group, Problem

__all__ = ["Clustering", "Cost", "Dissolved", "Group", "Problem", "cluster", "schedule"]
