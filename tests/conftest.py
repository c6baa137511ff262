"""Compiles the library once: where bytecode is not kept, each of the hundreds of processes that tests start would."""

from __future__ import annotations

import compileall
from pathlib import Path

import stoker

compileall.compile_dir(Path(stoker.__file__).parent, quiet=2)
