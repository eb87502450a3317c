# SPDX-License-Identifier: Apache-2.0
"""The exception inside the importer."""


class NotImported(Exception):
    """A node, or a form of it, that the table has no row for; the text is a sentence."""
