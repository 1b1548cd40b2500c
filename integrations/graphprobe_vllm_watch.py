"""One runner of vLLM, watched: its forward in the ledger, how its graphs are timed, and where the counts go."""

from __future__ import annotations

import importlib
import weakref
from typing import Any

from graphprobe.buckets import Buckets
from graphprobe.instrument import kept
from graphprobe.ledger import LEDGER
from graphprobe.observe import Probe, observe
from graphprobe.sentinel import SENTINEL
from graphprobe.stopwatch import Stopwatch
from graphprobe_vllm import PATCHES
from graphprobe_vllm_answers import ask_v2, breakable, modes, off, padding

UNSEEN = 16
"""Steps whose decision nobody saw, after which there is a warning."""

OUTSIDE: list[float] = [0]
"""Decisions since the start that belong to no step; not counted where idle ranks have such."""


class Watch:
    """A model runner and what is counted of it. Made when its graphs are captured, or with its first step."""

    def __init__(self, runner: Any) -> None:
        config = runner.vllm_config
        self.config = config
        drafts = int(getattr(config, "num_speculative_tokens", 0) or 0)
        width = getattr(runner, "decode_query_len", getattr(runner, "uniform_decode_query_len", None))
        self.tokens_per_request = max(1, width if isinstance(width, int) else 1 + drafts)
        self.device = str(getattr(getattr(runner, "device", None), "type", ""))
        self.manager = getattr(runner, "cudagraph_manager", None)
        self.dispatcher: Any = getattr(runner, "cudagraph_dispatcher", None)
        self._runner = weakref.ref(runner)
        piecemeal = breakable() if self.manager is None else bool(getattr(self.manager, "use_breakable_cg", False))
        self.modes = modes(piecemeal)
        """vLLM's modes of a step in our words; what is missing is eager."""
        self.off = off(self.mode)
        """Whether there are no graphs at all, which is then the reason of each step."""
        buckets = None if self.off else sizes(self.manager, self.dispatcher, config.compilation_config)
        self.probe = self._observe("vllm", buckets, "target")
        self.graph_call = self.probe.graph_call
        self.judged = SENTINEL.judges(self.probe.forward)
        """Whether what is counted is held against what was launched."""
        self.probe.forward.phases = ("verify",) if self.tokens_per_request > 1 else ("decode",)
        self._drafter: Probe | None = None
        self.stopwatch = Stopwatch(self.device)
        self.unseen = 0
        self.published = False

    def _observe(self, name: str, buckets: Buckets | None, role: str) -> Probe:
        return observe(name, buckets, unit="tokens", source="engine", role=role, backend=self.device)

    @property
    def drafter(self) -> Probe:
        """The probe of the model that drafts speculative tokens, with a forward of its own."""
        if self._drafter is None:
            self._drafter = self._observe("vllm.drafter", None, "drafter")
            self._drafter.forward.phases = ("draft",)
        return self._drafter

    @property
    def mode(self) -> Any:
        """vLLM's ``cudagraph_mode`` of this runner, None where it has none."""
        return getattr(self.dispatcher if self.manager is None else self.manager, "cudagraph_mode", None)

    def decode_mode(self) -> str:
        """The mode that vLLM gives decode steps where their size allows it; empty where graphs are off."""
        decode: Any = None if off(self.mode) else self.mode.decode_mode()
        return "" if off(decode) else str(decode.name)

    def decode_steps(self) -> list[tuple[int, int]]:
        """The uniform decode steps that can occur: numbers of requests, with the tokens of each request."""
        limits = self.config.scheduler_config
        speculative: Any = getattr(self.config, "speculative_config", None)
        most = getattr(limits, "max_num_active_seqs", None) or limits.max_num_seqs
        widths = dict.fromkeys(range(1, most + 1), self.tokens_per_request)
        dynamic = getattr(speculative, "uses_dynamic_speculative_decoding", None)
        if dynamic is not None and dynamic():
            # Fewer drafts for larger batches; vLLM expands its schedule with this function.
            expand = importlib.import_module("vllm.v1.spec_decode.dynamic.utils").build_dynamic_sd_schedule_lookup
            drafts = speculative.num_speculative_tokens
            schedule = expand(speculative.num_speculative_tokens_per_batch_size, most, drafts)
            widths = {n: self.tokens_per_request - drafts + schedule[n] for n in widths}
        # A step of more tokens than may be batched never occurs.
        return [(n, width) for n, width in widths.items() if n == 1 or n * width <= limits.max_num_batched_tokens]

    def served(self, requests: int, tokens: int) -> str:
        """How vLLM would run a uniform decode: FULL, PIECEWISE or NONE, told by its own dispatcher."""
        if self.manager is not None:
            asked = {"uniform_token_count": tokens // requests, "max_query_len": tokens // requests}
            return str(ask_v2(self.manager, requests, tokens, asked).cg_mode.name)
        loras = self.config.lora_config
        active = loras.max_loras if loras and not self.config.compilation_config.cudagraph_specialize_lora else 0
        answer = self.dispatcher.dispatch(
            num_tokens=padding(self._runner())(tokens),
            uniform_decode=True,
            has_lora=active > 0,
            num_active_loras=active,
        )
        return str(answer[0].name)

    def missed(self) -> None:
        """A step ended and no decision was seen."""
        self.unseen += 1
        forward = self.probe.forward
        if self.unseen == UNSEEN and not (forward.graph or forward.eager):
            LEDGER.hooks["vllm", "dispatch"] = False
            text = f"instrumented, but never called: {UNSEEN} steps ran and no runner was seen to decide on a graph"
            why = f"where only an encoder runs that is so; else {PATCHES.release} decides in another place"
            forward.explain("unseen", f"{text}; nothing is counted here ({why})")


def watch_of(runner: Any) -> Watch:
    """The watch of a runner, made at the first call."""
    return kept(runner, Watch)


def sizes(manager: Any, dispatcher: Any, compilation: Any) -> Buckets | None:
    """The tokens of all graphs that a runner has or will have; None where there are none."""
    listed: Any = getattr(manager, "_capture_descs", {}).items() if manager is not None else ()
    if dispatcher is not None:
        listed = dispatcher.get_capture_descs()
    found = {found.num_tokens for _, group in listed for found in group}
    found = found or set(compilation.cudagraph_capture_sizes or ())
    return Buckets(sorted(found)[:1024]) if found else None
