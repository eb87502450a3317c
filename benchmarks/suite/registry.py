# SPDX-License-Identifier: Apache-2.0
"""Every model of the suite by name, in the order of its families."""

from suite import diffusion, graphs, pictures, recommenders, speech, text
from suite.entry import FAMILIES, Entry

_ALL = (
    *text.ENTRIES,
    *pictures.ENTRIES,
    *recommenders.ENTRIES,
    *speech.ENTRIES,
    *diffusion.ENTRIES,
    *graphs.ENTRIES,
)

ENTRIES: dict[str, Entry] = {
    one.name: one for family in FAMILIES for one in _ALL if one.family == family
}
assert len(ENTRIES) == len(_ALL), "two models have one name"
