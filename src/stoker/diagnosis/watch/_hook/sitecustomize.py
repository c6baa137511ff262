"""Imported by every Python that ``stoker run`` starts (PYTHONPATH): runs the real ``sitecustomize``, arms the watch.

That includes Python 2.7, so this file uses only syntax that all versions accept. Before Python 3.10, which stoker does
not support, it arms nothing.
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
        raise  # the real one failed to import something
    if _this is not None:
        sys.modules["sitecustomize"] = _this
if "STOKER_RUN" in os.environ and sys.version_info >= (3, 10):
    try:
        import importlib.util

        # Loaded by path, without the package: a script that never imports torch must not pay for it, and a Python
        # without stoker must still work.
        _spec = importlib.util.spec_from_file_location("_stoker_hook", os.path.join(_here, "hook.py"))
        if _spec is not None and _spec.loader is not None:
            _hook = importlib.util.module_from_spec(_spec)
            sys.modules["_stoker_hook"] = _hook
            _spec.loader.exec_module(_hook)
            _hook.arm()
    except Exception as e:
        sys.stderr.write("stoker: not watching this process: " + type(e).__name__ + ": " + str(e) + "\n")
