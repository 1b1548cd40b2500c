"""A small SGLang with the places that graphprobe hooks: other code, the same seams. It is release 0.5.PATCH."""

PATCH = 23
__version__ = "0.5.23"
