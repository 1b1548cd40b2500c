from sglang.srt.model_executor.piecewise_cuda_graph_runner import PiecewiseCudaGraphRunner


class BreakableCudaGraphRunner(PiecewiseCudaGraphRunner):
    pass
