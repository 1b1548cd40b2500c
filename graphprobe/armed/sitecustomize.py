"""What Python imports at its start where `graphprobe run` has put this folder first in PYTHONPATH.

It hands on to the `sitecustomize` that would have been imported without it. Any Python may come across it, an old one
and one without graphprobe: for those it does nothing else, and has no syntax that they lack.
"""

import os
import sys

folder = os.path.dirname(os.path.abspath(__file__))
try:
    import graphprobe_arming

    graphprobe_arming.start()
except Exception:
    # Of all that COMMAND starts only COMMAND itself, which has the process of `run`: the others may be anything.
    if os.environ.get("GRAPHPROBE_RUN") == str(os.getpid()) and os.environ.get("GRAPHPROBE") == "1" and sys.stderr:
        sys.stderr.write("graphprobe: not installed for " + sys.executable + ", where nothing is counted then\n")

before = list(sys.path)
sys.path[:] = [entry for entry in before if os.path.abspath(entry) != folder]
without = list(sys.path)
del sys.modules["sitecustomize"]
try:
    # Where there is none, the error is the one that Python expects here.
    __import__("sitecustomize")
finally:
    # In its place again, for those who make a child's PYTHONPATH of it.
    if sys.path == without:
        sys.path[:] = before
    elif folder in before:
        sys.path.insert(0, folder)
