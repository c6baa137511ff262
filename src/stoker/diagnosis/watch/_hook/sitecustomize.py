"""Found by every Python that ``stoker run`` starts (PYTHONPATH): arms the watch, then gives way to the real one.

Every Python means 2.7, too: this file is in words that all of them know, and does nothing in those before 3.10, which
stoker does not know.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [p for p in sys.path if os.path.abspath(p or ".") != _here]
_this = sys.modules.pop("sitecustomize", None)
try:
    import sitecustomize  # type: ignore[import-not-found] # noqa: F401  the one this file stands in front of
except ImportError as _error:
    if getattr(_error, "name", "sitecustomize") != "sitecustomize":
        raise  # the real one lacks something
    if _this is not None:
        sys.modules["sitecustomize"] = _this
if "STOKER_RUN" in os.environ and sys.version_info >= (3, 10):
    try:
        import importlib.util

        # By path and alone: a script that never imports torch must not pay for it, and one whose Python has no
        # stoker is left in peace.
        _spec = importlib.util.spec_from_file_location("_stoker_hook", os.path.join(_here, "hook.py"))
        if _spec is not None and _spec.loader is not None:
            _hook = importlib.util.module_from_spec(_spec)
            sys.modules["_stoker_hook"] = _hook
            _spec.loader.exec_module(_hook)
            _hook.arm()
    except Exception as e:
        sys.stderr.write("stoker: not watching this process: " + type(e).__name__ + ": " + str(e) + "\n")
