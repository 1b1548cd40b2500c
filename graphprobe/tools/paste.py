"""What is pasted so that an engine captures a list, or nothing."""

from __future__ import annotations

from collections.abc import Sequence

from graphprobe.buckets import Buckets, as_max_batch
from graphprobe.tools.engines import rule

LINE = {
    "graphprobe": "@graphprobe.capture(buckets=[{commas}]{options}){note}",
    "vllm": """--compilation-config '{{"cudagraph_capture_sizes": [{commas}]}}'
# steps with prefill run piecewise by the same list: add larger sizes to keep those (vLLM's own: up to 512 tokens)""",
    "sglang": """--cuda-graph-bs-decode {words}{exact}
# SGLang 0.5.13 and before: --cuda-graph-bs {words}{exact}""",
    "tensorrt-llm": """cuda_graph_config: {{batch_sizes: [{commas}], enable_padding: {padding}}}
# in the YAML file of trtllm-serve --config FILE (older name: --extra_llm_api_options FILE)""",
    "lmdeploy": """--backend pytorch --cudagraph-capture-batch-sizes {words}{limit}
# LMDeploy 0.14 and later, which also captures --max-batch-size; earlier ones and the TurboMind engine take no list""",
}
"""What is pasted: one line, and comments below it. Spellings are those of the release in `ENGINE`."""

OFF = {
    "graphprobe": "leave @graphprobe.capture out, or set .enabled = False on what it made",
    "vllm": """--compilation-config '{"cudagraph_mode": "NONE"}'""",
    "sglang": "--disable-decode-cuda-graph",
    "tensorrt-llm": "cuda_graph_config: null",
    "lmdeploy": "--eager-mode",
}
"""How an engine is told to capture nothing."""


ON = {
    "vllm": "start it without --enforce-eager and with a cudagraph_mode other than NONE",
    "sglang": "start it without --disable-cuda-graph and --disable-decode-cuda-graph",
}
"""How an engine is told to capture again, where it was told not to."""


def line(engine: str, buckets: Sequence[int], *, max_batch: int | None = None, pad: bool = True, name: str = "") -> str:
    """The text to paste so that ``engine`` captures ``buckets``: one line, and comments below it.

    ``max_batch`` is the largest size that will be sent, in the unit of the buckets; ``name`` is the decorator's.
    """
    sizes = Buckets(buckets).sizes
    pad = rule(engine, pad=pad).pads
    options = [
        *(['pad="repeat"'] if pad else []),
        # To an exact decorator it would mean that each size up to it is sent.
        *([f"max_batch={as_max_batch(max_batch)}"] if max_batch is not None and pad else []),
        *([f"max_graphs={len(sizes)}"] if len(sizes) > 64 else []),  # 64 is the default
        *([f"name={_quoted(name)}"] if name else []),
    ]
    return LINE[engine].format(
        commas=", ".join(map(str, sizes)),
        words=" ".join(map(str, sizes)),
        options="".join(f", {option}" for option in options),
        note="\n# a forward that writes a cache needs pad={argument: fill}, with a scratch slot" if pad else "",
        exact="" if pad else " --disable-cuda-graph-padding",
        padding=str(pad).lower(),
        limit="" if max_batch is None else f" --max-batch-size {as_max_batch(max_batch)}",
    )


def _quoted(name: str) -> str:
    return '"' + name.encode("unicode_escape").decode("ascii").replace('"', '\\"') + '"'
