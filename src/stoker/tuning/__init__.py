"""Tuning: settings found by measuring, never while training. A client of the road; no stage imports it."""
