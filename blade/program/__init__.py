# SPDX-License-Identifier: Apache-2.0
"""The file format: programs of engines, guards, and saved files read as data."""
