"""The scheduling core: facts in, commands out.

Rule 1: nothing below this folder does I/O, reads a clock or draws a random number.
Rule 2: every fact enters as an Event that carries `now`; every wish leaves as an Action.
Rule 3: the same events in the same order give the same actions, in any process.
Rule 4: amounts are integers; what is held is derived from job states, never kept beside them.
"""

from __future__ import annotations
