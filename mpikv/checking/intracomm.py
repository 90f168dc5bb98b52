"""Communicators and requests of mpi4py with checks: subclasses, so that libraries take them.

They have the handles of the objects that they are made from. A method that is not here is mpi4py's own, unchecked:
persistent and neighbourhood collectives, windows, files, spawned processes, intercommunicators.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial, wraps
from typing import Any

from ..cluster.agreement import compare_requests
from ..cluster.connecting import connect
from ..cluster.mpi_library import load_mpi
from ..cluster.process_group import ProcessGroup
from ..config import OWN_AFFAIRS, Config
from ..errors import ConfigError
from .check import Check, Started, end_checks, place_of_caller
from .facts import BUFFERS, OBJECTS, Facts

MPI: Any = load_mpi()
_Comm, _Request = MPI.Intracomm, MPI.Request


class _AnyRequest(type):
    """Counts every request of MPI as one of the class: under ``--check`` its name is ``MPI.Request``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Request) if cls is CheckedRequest else type.__instancecheck__(cls, instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Request) if cls is CheckedRequest else type.__subclasscheck__(cls, subclass)


class CheckedRequest(_Request, metaclass=_AnyRequest):  # type: ignore[misc]
    """A request with the deadline, and the comparison, of the communicator that it comes from."""

    _check: Check | None = None
    _started: Started

    def __new__(cls, request: Any = None) -> Any:
        return super().__new__(cls, request)

    def _settle(self) -> None:
        """Wait until it is complete, and compared if it is a collective call."""
        if self._check is not None and self:
            self._check.complete(self._started, partial(_Request.Get_status, self))

    def _look(self) -> None:
        if self._check is not None:
            self._check.look()


def _settle_all(requests: Iterable[Any]) -> None:
    for request in requests:
        if type(request) is CheckedRequest:
            request._settle()


def _settle_any(requests: Sequence[Any]) -> None:
    """Wait until one of several requests is complete."""
    checked = [request for request in requests if type(request) is CheckedRequest and request]
    # Requests of other origins complete without us.
    if checked and len(checked) == sum(map(bool, requests)):
        _look_at(checked)
        text = f"any of {len(checked)} requests, the first {checked[0]._started.text}"
        peers = sorted({peer for request in checked for peer in request._started.peers})
        checked[0]._check.wait(lambda: any(map(_Request.Get_status, checked)), text, peers, requests)


def _look_at(requests: Iterable[Any]) -> None:
    for request in requests:
        if type(request) is CheckedRequest:
            request._look()


def _preceded(name: str, first: Callable[[Any], None]) -> Any:
    """Return a method of requests that does something before MPI's."""
    raw = getattr(_Request, name)

    @wraps(raw)
    def method(it: Any, *given: Any, **named: Any) -> Any:
        first(it)
        return raw(it, *given, **named)

    return method


def _preceded_for_all(name: str, first: Callable[[Any], None]) -> Any:
    """Return a class method of requests that does something with a list of them before MPI's."""
    raw = getattr(_Request, name)

    @wraps(raw)
    def method(cls: Any, requests: Any, *given: Any, **named: Any) -> Any:
        first(requests)
        return raw(requests, *given, **named)

    return classmethod(method)


for _name in ("Wait", "wait"):
    setattr(CheckedRequest, _name, _preceded(_name, CheckedRequest._settle))
for _name in ("Test", "test"):
    setattr(CheckedRequest, _name, _preceded(_name, CheckedRequest._look))
for _first, _names in (
    (_settle_all, ("Waitall", "waitall")),
    (_settle_any, ("Waitany", "waitany", "Waitsome", "waitsome")),
    (_look_at, ("Testall", "testall", "Testany", "testany", "Testsome", "testsome")),
):
    for _name in _names:
        setattr(CheckedRequest, _name, _preceded_for_all(_name, _first))


def _where_checked(method: Any) -> Any:
    """Make a method MPI's own where there are no checks."""
    raw = getattr(_Comm, method.__name__)

    @wraps(raw)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        return (raw if self.check is None else method)(self, *given, **named)

    return call


class Checks:
    """The checked methods of a communicator. Without a :class:`Check`, as of ``MPI.COMM_NULL``, all are MPI's own."""

    check: Check | None = None

    def _open(self: Any, config: Config, made_by: str, group: ProcessGroup | None = None) -> Any:
        """Begin the checks, and return the communicator. Collective over it."""
        self.check = Check(group or ProcessGroup(_Comm(self), timeout=config.timeout), config, made_by)
        return self

    def _tracked(self: Any, request: Any, verb: str, peer: int, tag: int) -> Any:
        """Return a checked request of a message."""
        checked = CheckedRequest(request)
        checked._check = self.check
        text = _message(verb, peer, tag)
        checked._started = self.check.track(checked, text, self.check.peers(peer), place_of_caller(3))
        return checked

    def _complete(self: Any, request: Any, status: Any, verb: str, peer: int, tag: int) -> None:
        test = partial(request.Test, status) if status is not None else request.Test
        if not test():
            self.check.wait(test, _message(verb, peer, tag), self.check.peers(peer), request)

    def _matched(self: Any, probe: Callable[..., Any], source: int, tag: int, status: Any, verb: str) -> Any:
        """Wait for a message, and return what a nonblocking probe then returns."""
        found: list[Any] = []

        def is_here() -> bool:
            found[:] = [probe(self, source, tag, status)]
            return bool(found[0])

        self.check.wait(is_here, _message(verb, source, tag), self.check.peers(source))
        return found[0]

    # --- Messages

    @_where_checked
    def Sendrecv(  # noqa: N802
        self: Any,
        sendbuf: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> None:
        receive = _Comm.Irecv(self, recvbuf, source, recvtag)
        send = _Comm.Isend(self, sendbuf, dest, sendtag)
        self._complete(receive, status, "Sendrecv: Recv", source, recvtag)
        self._complete(send, None, "Sendrecv: Send", dest, sendtag)

    @_where_checked
    def sendrecv(
        self: Any,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: Any = None,
    ) -> Any:
        send = _Comm.isend(self, sendobj, dest, sendtag)
        received = self.recv(recvbuf, source, recvtag, status)
        self._complete(send, None, "sendrecv: send", dest, sendtag)
        return received

    @_where_checked
    def Recv(  # noqa: N802
        self: Any, buf: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> None:
        self._complete(_Comm.Irecv(self, buf, source, tag), status, "Recv", source, tag)

    @_where_checked
    def recv(
        self: Any, buf: Any = None, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None
    ) -> Any:
        # Not irecv: without a buffer it takes messages up to 32 KiB only.
        return self._matched(_Comm.improbe, source, tag, status, "recv").recv(status)

    # --- Communicators

    def Free(self: Any) -> None:  # noqa: N802
        self._leave("Free")

    def Disconnect(self: Any) -> None:  # noqa: N802
        self._leave("Disconnect")

    def free(self: Any) -> None:
        if self.check is not None:
            self.Free()
        else:
            _Comm.free(self)

    def _leave(self: Any, verb: str) -> None:
        check, self.check = self.check, None
        if check is not None:
            check.begin(verb, ())
            check.close()
        getattr(_Comm, verb)(self)


def _message(verb: str, peer: int, tag: int) -> str:
    way = "to" if "end" in verb.rpartition(" ")[2] else "from"
    who = "any rank" if peer == MPI.ANY_SOURCE else f"rank {peer}"
    return f"{verb}({way} {who}{'' if tag == MPI.ANY_TAG else f', tag {tag}'})"


def _collective(name: str, verb: str, facts: Callable[..., Facts]) -> Any:
    raw = getattr(_Comm, name)

    @wraps(raw)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        if self.check is not None:
            self.check.begin(verb, facts(self, *given, **named))
        return raw(self, *given, **named)

    return method


def _nonblocking(name: str, facts: Callable[..., Facts]) -> Any:
    raw = getattr(_Comm, name)

    @wraps(raw)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        if self.check is None:
            return raw(self, *given, **named)
        described = facts(self, *given, **named)
        request = CheckedRequest(raw(self, *given, **named))
        request._check = self.check
        request._started = self.check.post(name, described, request, place_of_caller())
        return request

    return method


def _sending(name: str, started: str) -> Any:
    raw, start = getattr(_Comm, name), getattr(_Comm, started)

    @wraps(raw)
    def method(self: Any, buf: Any, dest: int, tag: int = 0) -> None:
        if self.check is None:
            raw(self, buf, dest, tag)
        else:
            self._complete(start(self, buf, dest, tag), None, name, dest, tag)

    return method


def _starting(name: str) -> Any:
    raw = getattr(_Comm, name)
    place = 0 if "recv" in name else 1

    @wraps(raw)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        request = raw(self, *given, **named)
        if self.check is None:
            return request
        names = ("source", "tag") if place == 0 else ("dest", "tag")
        peer, tag = (
            given[at] if len(given) > at else named.get(key, default)
            for at, key, default in zip((1, 2), names, (MPI.ANY_SOURCE, MPI.ANY_TAG if place == 0 else 0), strict=True)
        )
        return self._tracked(request, name, peer, tag)

    return method


def _probing(name: str, started: str) -> Any:
    raw, probe = getattr(_Comm, name), getattr(_Comm, started)

    @wraps(raw)
    def method(self: Any, source: int = MPI.ANY_SOURCE, tag: int = MPI.ANY_TAG, status: Any = None) -> Any:
        if self.check is None:
            return raw(self, source, tag, status)
        return self._matched(probe, source, tag, status, name)

    return method


def _making(name: str, compared: bool) -> Any:
    raw = getattr(_Comm, name)

    @wraps(raw)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        if self.check is None:
            return raw(self, *given, **named)
        if compared:
            self.check.begin(name, ())
        made = raw(self, *given, **named)
        if made == MPI.COMM_NULL:
            return made
        return _classes()[_kind_of(made)](made)._open(self.check.config, name)

    return method


def _kind_of(made: Any) -> Any:
    return next(kind for kind in type(made).__mro__ if kind.__module__ == _Comm.__module__)


for _name, _facts in BUFFERS.items():
    setattr(Checks, _name, _collective(_name, _name, _facts))
    setattr(Checks, f"I{_name.lower()}", _nonblocking(f"I{_name.lower()}", _facts))
for _name, _facts in OBJECTS.items():
    setattr(Checks, _name, _collective(_name, _name, _facts))
# The two names of one call.
Checks.barrier = _collective("barrier", "Barrier", BUFFERS["Barrier"])  # type: ignore[attr-defined]
for _name, _started in {"Send": "Isend", "Ssend": "Issend", "send": "isend", "ssend": "issend"}.items():
    setattr(Checks, _name, _sending(_name, _started))
for _name in ("Isend", "Issend", "Ibsend", "Irsend", "Irecv", "isend", "issend", "ibsend", "irecv"):
    setattr(Checks, _name, _starting(_name))
for _name, _started in {"Probe": "Iprobe", "Mprobe": "Improbe", "probe": "iprobe", "mprobe": "improbe"}.items():
    setattr(Checks, _name, _probing(_name, _started))
for _name in ("Dup", "Dup_with_info", "Clone", "Create", "Split", "Split_type", "Create_cart", "Create_graph",
              "Create_dist_graph", "Create_dist_graph_adjacent"):  # fmt: skip
    setattr(Checks, _name, _making(_name, True))
Checks.Create_group = _making("Create_group", False)  # type: ignore[attr-defined]  # the other ranks do not call it


class CheckedComm(Checks, _Comm):  # type: ignore[misc]
    """An ``MPI.Intracomm`` whose ranks compare their calls. It has the handle of the one it is made from."""

    def __new__(cls, comm: Any = None) -> Any:
        return super().__new__(cls, comm)


@cache
def _classes() -> dict[Any, Any]:
    """Return the checked class of each class of communicators."""
    kinds = (MPI.Cartcomm, MPI.Graphcomm, MPI.Distgraphcomm)
    return {_Comm: CheckedComm} | {kind: type(f"Checked{kind.__name__}", (Checks, kind), {}) for kind in kinds}


def open_checks(comm: Any, made_by: str, timeout: float | None = None, warn_after: float | None = None) -> Any:
    """Begin the checks of a communicator that is no result of a checked one. Collective."""
    config, problem = Config(), None
    try:
        config = Config.read(timeout=timeout, warn_after=warn_after)
    except ConfigError as error:  # the other ranks wait to hear
        problem = error
    group = connect(_Comm(comm), config)
    wanted = {key: repr(value) for key, value in asdict(config).items() if key not in OWN_AFFAIRS}
    compare_requests(group, "checked", wanted, problem)
    atexit.register(_end_at_exit)
    return comm._open(config, made_by, group)


def _end_at_exit() -> None:
    if not MPI.Is_finalized():
        end_checks()
