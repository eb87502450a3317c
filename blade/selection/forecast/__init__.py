# SPDX-License-Identifier: Apache-2.0
"""Forecasts which backends may win, from measured speeds at similar work, before they are imported."""
