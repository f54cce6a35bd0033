"""Everything that touches the world, one file each: sockets, database, processes, NVML, psutil.

Rule 1: no adapter imports another, nor the core's machine: values in, values out.
Rule 2: an adapter translates; it never decides.
Rule 3: an error of the outside world becomes a value or one of rlq.errors; nothing else escapes.
"""

from __future__ import annotations
