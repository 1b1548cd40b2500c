"""The shape of vLLM: its names, arguments and order of calls, without a model, and without a graph in its graphs."""

__version__ = "0.33.0"
