"""The pump: facts in, a step of the core, ONE commit, effects, replies.

Rule 1: nothing here decides who runs where: that is the core's.
Rule 2: nothing leaves (a process, a signal, a reply) before the rows behind it are committed.
Rule 3: one thread owns core, store and sockets; the monitors' threads only hand over values.
Rule 4: whatever fails, running jobs run on, and the state is as after a restart.
"""

from __future__ import annotations
