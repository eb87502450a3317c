# SPDX-License-Identifier: Apache-2.0
"""A report as one self-contained page of HTML."""

from blade.report_page.page import render

__all__ = ["render"]
