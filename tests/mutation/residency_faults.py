"""Planted faults in who leaves the device, who comes back, and what lossy tiers and budgets promise."""

from __future__ import annotations

from mutation.faults import PlantedFault

__all__ = ["RESIDENCY_FAULTS"]

RULES = ("tests/policy/test_residency_rules.py",)
RESIDENTS = ("tests/serving/test_residents.py",)
HIBERNATE = ("tests/runtime/test_hibernate.py",)
QUANTISED = ("tests/tiers/test_quantised.py",)
BUDGET = ("tests/tiers/disk/test_budget.py",)

RESIDENCY_FAULTS = (
    PlantedFault(
        "a dense dialogue leaves as soon as any other",
        "policy/residency.py",
        "(rules.dense_stay_s if resident.is_dense else rules.min_stay_s)",
        "rules.min_stay_s",
        RULES,
    ),
    PlantedFault(
        "the least idle session leaves first",
        "policy/residency.py",
        "-residents[i].idle_s))",
        "residents[i].idle_s))",
        RULES,
    ),
    PlantedFault(
        "late returns count as thrash",
        "policy/residency.py",
        "        if away_s > self.soon_s:\n            return False\n",
        "",
        RULES,
    ),
    PlantedFault(
        "sessions leave down to the high watermark only",
        "serving/residents.py",
        "self._held() > self._rules.low)",
        "self._held() > self._rules.high)",
        RESIDENTS,
    ),
    PlantedFault(
        "idle sessions leave for a request that won't fit anyway",
        "serving/residents.py",
        "blocks:\n            return\n        for i in leaving_order(self._facts(idle), self._rules, pressed=True):",
        "blocks:\n            pass\n        for i in leaving_order(self._facts(idle), self._rules, pressed=True):",
        RESIDENTS,
    ),
    PlantedFault(
        "nobody makes room for a request",
        "serving/residents.py",
        "        manager.relief = self.make_room\n",
        "",
        RESIDENTS,
    ),
    PlantedFault(
        "the engine thread is never told to look again",
        "serving/residents.py",
        "        self._has_more = above or too_many > 0\n",
        "        self._has_more = False\n",
        RESIDENTS,
    ),
    PlantedFault(
        "a session that has left says that it is there",
        "sessions/session.py",
        "        self.is_swapped_out = True\n",
        "",
        (*RESIDENTS, *HIBERNATE),
    ),
    PlantedFault(
        "a prewarmed session never takes over what came back",
        "serving/prewarm.py",
        "            session.sequence.adopt_prefix()\n",
        "            pass\n",
        HIBERNATE,
    ),
    PlantedFault(
        "a prewarm begins at once, whatever its time",
        "serving/prewarm.py",
        "            if self._clock() < prewarm.due:\n                return\n",
        "",
        HIBERNATE,
    ),
    PlantedFault(
        "a prewarm keeps its fork",
        "serving/prewarm.py",
        "            prewarm.fork.release()\n",
        "            pass\n",
        HIBERNATE,
    ),
    PlantedFault(
        "who waits for a prewarm is forgotten when the runtime closes",
        "serving/thread.py",
        "        self._core.moves.stop()\n",
        "",
        HIBERNATE,
    ),
    PlantedFault(
        "closing drops what was still to be stored",
        "residency/residency.py",
        "        self._drain(deadline)\n",
        "",
        HIBERNATE,
    ),
    PlantedFault(
        "a lossy tier's blocks pass for exact ones",
        "runtime/parts.py",
        '        if self.exactness != "exact":\n            parts.append(self.exactness)\n',
        "",
        HIBERNATE,
    ),
    PlantedFault(
        "keys are quantised per token",
        "tiers/codecs/quantised.py",
        "KEY_AXIS, VALUE_AXIS = 1, 3",
        "KEY_AXIS, VALUE_AXIS = 3, 3",
        QUANTISED,
    ),
    PlantedFault(
        "a minimum is rounded up",
        "tiers/codecs/quantised.py",
        "least = _rounded(part.min(axis=axis, keepdims=True), down=True)",
        "least = _rounded(part.max(axis=axis, keepdims=True), down=True)",
        QUANTISED,
    ),
    PlantedFault(
        "the other models' folders don't count",
        "tiers/disk/budget.py",
        "    return max(budget_bytes - total, budget_bytes - half)\n",
        "    return budget_bytes\n",
        BUDGET,
    ),
    PlantedFault(
        "the folder written last is cleared first",
        "tiers/disk/budget.py",
        "key=lambda one: one[1].newest or 0.0)",
        "key=lambda one: -(one[1].newest or 0.0))",
        BUDGET,
    ),
)
