"""What `import graphprobe` adds to the start of a program.

    python benchmarks/imports.py [--json FILE] [--rounds N]

Milliseconds in fresh interpreters that load no torch, medians: of the import statement by the interpreter's own clock,
and of a whole process beside one that does nothing.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from measuring import head, options, write

TIMED = """
from time import perf_counter
began = perf_counter()
import graphprobe
spent = perf_counter() - began
import sys
assert 'torch' not in sys.modules
print(spent)
"""
PROCESSES = {"pass": "pass", "import json": "import json", "import graphprobe": "import graphprobe"}


def python(code: str) -> tuple[float, str]:
    """Seconds of a fresh interpreter that runs ``code``, and what it printed. Started where graphprobe lies."""
    root = Path(__file__).parents[1]
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def main() -> None:
    """Measure and print."""
    given = options(__doc__, 30)
    statement: list[float] = []
    processes: dict[str, list[float]] = {name: [] for name in PROCESSES}
    # The first one may have to write the bytecode.
    python(TIMED)
    for _ in range(given.rounds):
        statement.append(float(python(TIMED)[1]))
        for name, code in PROCESSES.items():
            processes[name].append(python(code)[0])
    result = head() | {
        "rounds": given.rounds,
        "statement_ms": statistics.median(statement) * 1e3,
        "least_ms": min(statement) * 1e3,
        "process_ms": {name: statistics.median(spent) * 1e3 for name, spent in processes.items()},
    }
    print(f"import graphprobe: {result['statement_ms']:.1f} ms (least {result['least_ms']:.1f})")
    for name, spent in result["process_ms"].items():
        print(f"a process with `{name}`: {spent:.1f} ms")
    write(result, given.json)


if __name__ == "__main__":
    main()
