# SPDX-License-Identifier: Apache-2.0
"""Two caches of earlier results on disk: engines of single clusters, and decisions on whole modules."""
