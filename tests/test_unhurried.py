"""A reader gives way: with the interpreter's own switching put off, other threads run only when it does."""

from __future__ import annotations

import subprocess
import sys

import pytest

from graphprobe.unhurried import unhurried

PRELUDE = """
import sys, threading
sys.setswitchinterval(1000)
turns = 0
ended = False
def serve():
    global turns
    while not ended:
        turns += 1
        asleep.wait(1e-5)
asleep = threading.Event()
from graphprobe.ledger import Ledger
from graphprobe.observe import observe
from graphprobe.unhurried import unhurried
ledger = Ledger()
probe = observe("decode", range(1, 300), ledger=ledger)
for size in range(300, 5000):
    probe.eager_call(size, "batch_too_large")
for number in range(5):
    observe(f"decode{number}", range(1, 100), ledger=ledger)
"""

FINALE = """
step()
thread = threading.Thread(target=serve)
thread.start()
before = turns
step()
met, ended = turns - before, True
print(met)
"""

STEPS = {
    "a loop": "step = lambda: sum(unhurried(range(100_000)))",
    "a snapshot": "step = lambda: ledger.snapshot()",
    "the JSON of it": "step = lambda: ledger.snapshot().to_json()",
    "samples": "from graphprobe import metrics; step = lambda: metrics.samples(ledger.snapshot())",
    "a page of the client": """
import prometheus_client
from graphprobe.export.prometheus import register
register(registry := prometheus_client.CollectorRegistry(), ledger)
families = list(registry.collect())
class Again:
    def collect(self):
        return families
step = lambda: prometheus_client.generate_latest(Again())
""",
}


@pytest.mark.parametrize("what", STEPS)
def test_others_run_while_a_reader_is_at_it(what: str) -> None:
    """What reads a ledger, or writes it down, lets the threads that serve run several times before it is done."""
    code = f"{PRELUDE}{STEPS[what]}{FINALE}"
    done = subprocess.run([sys.executable, "-c", code], check=True, text=True, capture_output=True, timeout=60)
    assert int(done.stdout) > 3


def test_the_items_are_those_that_were_given() -> None:
    """Nothing is lost, doubled or put in another order on the way."""
    assert list(unhurried(iter("abc"))) == ["a", "b", "c"]
    assert list(unhurried([])) == []
