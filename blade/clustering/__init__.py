# SPDX-License-Identifier: Apache-2.0
"""Clustering: group graph nodes into engines. This folder uses only ints, no torch."""

from blade.clustering.cluster import cluster, schedule
from blade.clustering.problem import Clustering, Cost, Dissolved, Group, Problem

__all__ = ["Clustering", "Cost", "Dissolved", "Group", "Problem", "cluster", "schedule"]
