from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend
from sglang.srt.model_executor.runner_backend.full_cuda_graph_backend import FullCudaGraphBackend
from sglang.srt.model_executor.runner_backend.tc_piecewise_cuda_graph_backend import TcPiecewiseCudaGraphBackend

BACKENDS = {
    "full": FullCudaGraphBackend,
    "breakable": BreakableCudaGraphBackend,
    "tc_piecewise": TcPiecewiseCudaGraphBackend,
}
