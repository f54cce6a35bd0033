"""Requests come in and replies go out: who asks, what a request is, and the way back.

A request for a change becomes events here, before the step; a question waits for the commit.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import NoReturn

from rlq.errors import ProtocolError, UnavailableError
from rlq.protocol import codec
from rlq.protocol import messages as wire
from rlqd.adapters.curve import CurveServer
from rlqd.adapters.sqlite import Store
from rlqd.adapters.zeromq import Received, Server
from rlqd.core import model
from rlqd.shell.accounts import Peer, user_name
from rlqd.shell.attempts import Attempts
from rlqd.shell.condition import Condition, Stats
from rlqd.shell.remote import Keyring
from rlqd.shell.requests import Change, ChangeRequest, Desk, Route, safely, unavailable

log = logging.getLogger(__name__)

MESSAGES_PER_TURN = 512


@dataclass(frozen=True, slots=True)
class Asked:
    route: Route
    request_id: bytes
    request: ChangeRequest
    change: Change


@dataclass(frozen=True, slots=True)
class Question:
    """A request that only reads: answered after the commit of this turn."""

    route: Route
    request_id: bytes
    peer: Peer
    request: wire.Request


@dataclass(slots=True)
class Taken:
    """The requests of one turn."""

    asked: list[Asked] = field(default_factory=list[Asked])
    #: How many jobs they would add.
    jobs: int = 0
    questions: list[Question] = field(default_factory=list[Question])


@dataclass(slots=True, kw_only=True)
class Intake:
    condition: Condition
    stats: Stats
    store: Store
    desk: Desk
    attempts: Attempts
    keyring: Keyring
    server: Server
    #: None: nobody is served but on this machine.
    remote: CurveServer | None

    def take(self, ready: Collection[object], now: model.Instant) -> Taken:
        """`ready`: what the poller found."""
        taken = Taken()
        if self.server.connections.source in ready:
            self.server.tend()
        if self.server.socket in ready:
            for received in self.server.receive(MESSAGES_PER_TURN):
                peer = _peer(received)
                self._one(Route(received.route, peer.uid), peer, received.frames, now, taken)
        if self.remote is not None:
            self._take_remote(self.remote, now, taken)
        return taken

    def reply(self, route: Route, request_id: bytes, reply: wire.Reply) -> None:
        """Queue it.  One that no message can hold becomes an error."""
        request_id = request_id or b"?"
        frames = safely(partial(codec.encode, request_id, reply))
        if isinstance(frames, wire.Error):
            frames = codec.encode(request_id, frames)
        if route.key is None:
            self.server.send(route.id, frames, route.uid)
        elif self.remote is not None and self.keyring.peer_of(route.key) is not None:
            self.remote.send(route.id, frames, route.uid)

    def _take_remote(self, remote: CurveServer, now: model.Instant, taken: Taken) -> None:
        remote.tend()
        for received in remote.receive(MESSAGES_PER_TURN):
            peer = self.keyring.peer_of(received.key)
            if peer is None:
                # A key that was revoked meanwhile gets what an unknown one gets: nothing.
                remote.dropped += 1
                continue
            route = Route(received.route, peer.uid, received.key)
            self._one(route, peer, received.frames, now, taken)

    def _one(
        self, route: Route, peer: Peer, frames: list[bytes], now: model.Instant, taken: Taken
    ) -> None:
        self.stats.messages += 1
        try:
            request_id, request = codec.decode_request(frames)
        except ProtocolError as error:
            self.reply(route, codec.request_id_of(frames), codec.error_reply(error))
            return
        if not isinstance(request, ChangeRequest):
            taken.questions.append(Question(route, request_id, peer, request))
            return
        next_id = self.store.next_id + taken.jobs
        change = safely(partial(self._change, request, peer, now, next_id))
        if isinstance(change, wire.Error):
            self.reply(route, request_id, change)
        else:
            taken.asked.append(Asked(route, request_id, request, change))
            taken.jobs += len(change.incoming)

    def _change(
        self, request: ChangeRequest, peer: Peer, now: model.Instant, next_id: int
    ) -> Change:
        if self.condition.broken:
            self._stop_unrecorded(request, peer)
        return self.desk.change(request, peer, now, next_id)

    def _stop_unrecorded(self, request: ChangeRequest, peer: Peer) -> NoReturn:
        """A full disk records nothing, but the job that fills it must be stoppable."""
        stopped: list[int] = []
        if isinstance(request, wire.Cancel):
            for row in self.desk.mine(request.selection, peer):
                if done := self.attempts.stop_unrecorded(row.id, row.attempt, request.now):
                    log.info("%s stops job %d of %s", user_name(peer.uid), row.id, row.user)
                stopped += done
        if not stopped:
            raise unavailable(self.condition.broken)
        numbers = ", ".join(map(str, stopped))
        raise UnavailableError(
            f"asked {numbers} to stop, though nothing can be recorded: {self.condition.broken}",
            hint="cancel again once there is space: until then a stopped job counts as failed",
        )


def _peer(received: Received) -> Peer:
    """As whom a message counts.  A user's own daemon runs everything as that user, whoever came
    through to its socket: root by sudo, or, where the kernel names nobody, only themselves."""
    if os.geteuid() != 0 or received.peer is None:
        pid = 0 if received.peer is None else received.peer.pid
        return Peer(uid=os.geteuid(), gid=os.getegid(), pid=pid)
    return Peer(uid=received.peer.uid, gid=received.peer.gid, pid=received.peer.pid)
