"""All that client and daemon share: messages, the codec, and units of quantity.

Rule 1: nothing here does I/O.
Rule 2: a message is a frozen struct; requests and replies are tagged unions (docs/protocol.md).
Rule 3: a new field has a default; a field once published keeps its name and meaning.
Rule 4: what one side cannot read is a ProtocolError, never a crash.
"""

from __future__ import annotations

#: Raised when an old peer could misread a new message.  New optional fields do not raise it.
PROTOCOL_VERSION = 1
