"""Whether a cache saves more time than it costs."""

from __future__ import annotations

from ..staging.plan import Plan
from ..staging.trial import TrialResult

LEAST_GAIN = 2.0  # minimum ratio between making the first part of a sample and copying it from memory
LEAST_GAIN_S = 50e-6  # minimum saving in seconds
LEAST_GAIN_SHARE = 0.02  # minimum saving as a share of a sample's time
# of what a cache saves in an epoch: this much may comparing what samples depend on take before each epoch,
MOST_COMPARE_SHARE = 0.5
MOST_BEGIN_SHARE = 1.0  # and finding what they depend on, once; less than
LITTLE_S = 0.05  # does not matter


def why_it_does_not_pay(plan: Plan) -> str:
    """Why the first part of a sample is not worth caching; "" if it is."""
    least_s = max(LEAST_GAIN_S, LEAST_GAIN_SHARE * (plan.head_s + plan.tail_s))
    if plan.head_s >= max(LEAST_GAIN * plan.read_s, plan.read_s + least_s):
        return ""
    return (
        f"caching would not pay off: the deterministic part of a sample takes {plan.head_s * 1e6:,.0f} us of "
        f"{(plan.head_s + plan.tail_s) * 1e6:,.0f} us, copying it out of memory {plan.read_s * 1e6:,.0f} us"
    )


def why_comparing_does_not_pay(found: TrialResult, samples: int, workers: int) -> str:
    """Why a cache costs more than it saves in epochs of ``samples`` samples; "" if it does not."""
    saved_s = (found.sample_s - found.cached_s) * samples / workers
    costs = (found.compare_s, MOST_COMPARE_SHARE), (found.begin_s, MOST_BEGIN_SHARE)
    if all(cost_s <= max(LITTLE_S, share * saved_s) for cost_s, share in costs):
        return ""
    return (
        f"caching would not pay off: to find what samples depend on takes {found.begin_s:,.2g} s, to compare it "
        f"before each epoch {found.compare_s:,.2g} s, and the cache would save {saved_s:,.2g} s in an epoch"
    )
