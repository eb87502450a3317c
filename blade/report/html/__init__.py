# SPDX-License-Identifier: Apache-2.0
"""A report as one self-contained page of HTML."""

from blade.report.html.page import render

__all__ = ["render"]
