"""A make-believe machine under the real core, and a checker of what the core promised.

Rule 1: one seed is one run: no clock, no set order, no hash order; any process replays it.
Rule 2: the contract knows events and actions only, and shares nothing with the core but nouns.
Rule 3: faults are drawn per seed (swarm testing), so that each run stresses something else.
Rule 4: after the faults comes calm, and in it everything that can finish must.
"""

from __future__ import annotations
