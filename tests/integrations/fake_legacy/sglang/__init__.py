"""A small SGLang as it was until 0.5.13: other code, the same seams."""

__version__ = "0.5.13.post1"
