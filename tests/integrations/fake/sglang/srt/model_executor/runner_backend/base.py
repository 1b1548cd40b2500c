class Base:
    """Graphs by their keys. A capture runs the forward twice to warm up, and once more."""

    def __init__(self):
        self._graphs = {}

    def _capture(self, shape_key, forward_fn):
        for _ in range(3):
            forward_fn()
        self._graphs[shape_key] = forward_fn

    def replay(self, shape_key, model_runner):
        if model_runner.fails:
            raise model_runner.fails
        assert shape_key in self._graphs
        return "logits"
