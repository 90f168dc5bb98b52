"""Communicators and requests of mpi4py with checks: subclasses, so that libraries take them.

They have the handles of the objects that they are made from. A method that is not here is mpi4py's own, unchecked:
persistent and neighbourhood collectives, windows, files, spawned processes, intercommunicators.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial, wraps
from inspect import Signature, signature
from typing import Any, TypeAlias

from ..cluster.connecting import connect
from ..cluster.mpi_library import load_mpi
from ..cluster.process_group import ProcessGroup
from ..config import Config
from .check import Check, Describe, Operation, end_checks
from .facts import BUFFERS, OBJECTS, Facts, nothing

MPI: Any = load_mpi()
_Comm: Any = MPI.Intracomm
_Request: Any = MPI.Request
# MPI's own, by the name under which pickle looks for it.
COMM_WORLD = MPI.COMM_WORLD

_Run: TypeAlias = Callable[[Any, Any, Any, Any], Any]
"""Makes a checked call: of the communicator, MPI's method, and the arguments."""


class _AnyRequest(type):
    """Counts every request of MPI as one of the class: under ``--check`` its name is ``MPI.Request``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Request)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Request)


class CheckedRequest(_Request, metaclass=_AnyRequest):  # type: ignore[misc]
    """A request with the deadline, and the comparison, of the communicator that it comes from."""

    check: Check | None = None
    operation: Operation

    def __new__(cls, request: Any = None) -> Any:
        return super().__new__(cls, request)


def _checked(requests: Iterable[Any]) -> list[Any]:
    return [request for request in requests if getattr(request, "check", None) and request]


def _settle_all(requests: Iterable[Any]) -> None:
    """Wait until requests are complete, and compared if they are of collective calls."""
    for request in _checked(requests):
        request.check.complete(request.operation, partial(_Request.Get_status, request))


def _settle_any(requests: Sequence[Any]) -> None:
    """Wait until one of several requests is complete."""
    checked = _checked(requests)
    # Others complete without the checks: then MPI waits.
    if checked and len(checked) == sum(map(bool, requests)):
        described = [request.operation.describe() for request in checked]
        text = f"any of {len(checked)} requests, the first {described[0][0]}"
        peers = sorted({peer for _, peers in described for peer in peers})
        is_done = lambda: any(map(_Request.Get_status, checked))  # noqa: E731
        checked[0].check.wait(is_done, lambda: (text, peers), requests)


def _look_at(requests: Iterable[Any]) -> None:
    for request in _checked(requests):
        request.check.look()


def _precede(names: str, first: Callable[[Any], None], many: bool) -> None:
    """Have methods of requests do something with their requests before MPI's part."""
    for name in names.split():
        raw: Any = getattr(_Request, name)

        # With many, the class comes before the requests.
        @wraps(raw)
        def method(it: Any, *given: Any, raw: Any = raw, **named: Any) -> Any:
            first(given[0] if many else (it,))
            return raw(*given, **named) if many else raw(it, *given, **named)

        preceded: Any = method
        setattr(CheckedRequest, name, classmethod(preceded) if many else preceded)


_precede("Wait wait", _settle_all, many=False)
_precede("Test test", _look_at, many=False)
_precede("Waitall waitall", _settle_all, many=True)
_precede("Waitany waitany Waitsome waitsome", _settle_any, many=True)
_precede("Testall testall Testany testany Testsome testsome", _look_at, many=True)


class Checks:
    """The checked methods of a communicator. Without a :class:`Check`, as of ``MPI.COMM_NULL``, all are MPI's own."""

    check: Check | None = None

    def begin_checks(self: Any, config: Config, made_by: str, group: ProcessGroup | None = None) -> Any:
        """Begin the checks, and return the communicator. Collective over it."""
        self.check = Check(group or ProcessGroup(_Comm(self), timeout=config.timeout), config, made_by)
        return self


def _add(name: str, run: _Run) -> None:
    """Add a checked method."""
    raw = getattr(_Comm, name)

    @wraps(raw)
    def method(self: Any, *given: Any, **named: Any) -> Any:
        return raw(self, *given, **named) if self.check is None else run(self, raw, given, named)

    setattr(Checks, name, method)


def _collective(verb: str, facts: Callable[..., Facts]) -> _Run:
    def run(self: Any, raw: Any, given: Any, named: Any) -> Any:
        self.check.begin(verb, facts(self, *given, **named))
        result = raw(self, *given, **named)
        self.check.leave()
        return result

    return run


def _nonblocking(verb: str, facts: Callable[..., Facts]) -> _Run:
    def run(self: Any, raw: Any, given: Any, named: Any) -> Any:
        described = facts(self, *given, **named)
        request = CheckedRequest(raw(self, *given, **named))
        request.check = self.check
        request.operation = self.check.post(verb, described, request, sys._getframe(2))
        return request

    return run


@cache
def _signature(name: str) -> Signature:
    return signature(getattr(_Comm, name))


def _arguments(name: str, given: Any, named: Any) -> dict[str, Any]:
    bound = _signature(name).bind(None, *given, **named)
    bound.apply_defaults()
    return bound.arguments


def _describing(comm: Any, name: str, given: Any, named: Any) -> Describe:
    def describe() -> tuple[str, Sequence[int]]:
        arguments, words, peers = _arguments(name, given, named), list[str](), set[int]()
        for key, way in (("dest", "to"), ("source", "from")):
            if (rank := arguments.get(key)) is not None:
                words.append(f"{way} any rank" if rank == MPI.ANY_SOURCE else f"{way} rank {rank}")
                peers.update(range(comm.size) if rank == MPI.ANY_SOURCE else (rank,))
        tags = [tag for key, tag in arguments.items() if key.endswith("tag") and tag != MPI.ANY_TAG]
        return f"{name}({', '.join([*words, *(f'tag {tag}' for tag in tags[:1])])})", sorted(peers - {comm.rank})

    return describe


def _waited(name: str, start: str, at: int | None = None) -> _Run:
    """Return a run of a message that waits. ``at`` is the position of the status among its arguments."""

    def run(self: Any, raw: Any, given: Any, named: Any) -> None:
        status = named.pop("status", None) if at is None or len(given) <= at else given[at]
        try:
            request = getattr(_Comm, start)(self, *given[:at], **named)
        except NotImplementedError:  # an MPI before version 4 has no Isendrecv
            raw(self, *given, **named)
            return
        test = partial(request.Test, status)
        if not test():
            self.check.wait(test, _describing(self, name, given, named), request)

    return run


def _probed(name: str, probe: str) -> _Run:
    def run(self: Any, raw: Any, given: Any, named: Any) -> Any:
        found: list[Any] = []

        def is_here() -> bool:
            found[:] = [getattr(_Comm, probe)(self, *given, **named)]
            return bool(found[0])

        self.check.wait(is_here, _describing(self, name, given, named))
        return found[0]

    return run


def _receive(self: Any, raw: Any, given: Any, named: Any) -> Any:
    buf, *place = (_arguments("recv", given, named)[key] for key in ("buf", "source", "tag", "status"))
    # Not irecv: without a buffer it takes messages up to 32 KiB only.
    message = _probed("recv", "improbe" if buf is None else "iprobe")(self, None, tuple(place), {})
    return message.recv(place[2]) if buf is None else raw(self, buf, *place)


def _send_and_receive(self: Any, raw: Any, given: Any, named: Any) -> Any:
    _, *values = _arguments("sendrecv", given, named).values()
    send = _Comm.isend(self, *values[:3])
    received = self.recv(*values[3:])
    self.check.wait(send.Test, _describing(self, "sendrecv", given, named), send)
    return received


def _started(name: str) -> _Run:
    def run(self: Any, raw: Any, given: Any, named: Any) -> Any:
        request = CheckedRequest(raw(self, *given, **named))
        request.check = self.check
        # Without the buffer or object, which would live as long as the description.
        place = {key: value for key, value in named.items() if key not in ("buf", "obj")}
        describe = _describing(self, name, (None, *given[1:]), place)
        request.operation = self.check.track(request, describe, sys._getframe(2))
        return request

    return run


def _making(name: str, is_compared: bool = True) -> _Run:
    def run(self: Any, raw: Any, given: Any, named: Any) -> Any:
        if is_compared:
            self.check.begin(name, ())
        made = raw(self, *given, **named)
        return made if made == MPI.COMM_NULL else _CLASSES[type(made)](made).begin_checks(self.check.config, name)

    return run


def _freeing(name: str) -> _Run:
    def run(self: Any, raw: Any, given: Any, named: Any) -> None:
        check, self.check = self.check, None
        check.begin(name, ())
        check.close()
        raw(self)

    return run


for _name, _facts in BUFFERS.items():
    _add(_name, _collective(_name, _facts))
    _add(f"I{_name.lower()}", _nonblocking(f"I{_name.lower()}", _facts))
for _name in OBJECTS:
    _add(_name, _collective(_name, OBJECTS[_name]))
_add("barrier", _collective("Barrier", nothing))  # the two names of one call
for _name in ("Send", "Ssend", "send", "ssend"):
    _add(_name, _waited(_name, f"I{_name.lower()}" if _name[0] == "S" else f"i{_name}"))
for _name, _at in (("Recv", 3), ("Sendrecv", 6), ("Sendrecv_replace", 5)):
    _add(_name, _waited(_name, f"I{_name.lower()}", _at))
for _name in ("Probe", "Mprobe", "probe", "mprobe"):
    _add(_name, _probed(_name, f"I{_name.lower()}" if _name[0] in "PM" else f"i{_name}"))
_add("recv", _receive)
_add("sendrecv", _send_and_receive)
for _name in ("Isend", "Issend", "Ibsend", "Irsend", "Irecv", "isend", "issend", "ibsend", "irecv"):
    _add(_name, _started(_name))
for _name in ("Dup", "Dup_with_info", "Clone", "Create", "Split", "Split_type"):
    _add(_name, _making(_name))
for _name in ("Create_cart", "Create_graph", "Create_dist_graph", "Create_dist_graph_adjacent"):
    _add(_name, _making(_name))
_add("Create_group", _making("Create_group", is_compared=False))  # the other ranks do not call it
for _name in ("Free", "Disconnect", "free"):
    _add(_name, _freeing(_name.capitalize()))


class _Alike(type):
    """Makes a class equal to the class of MPI that it checks: programs compare the types of communicators."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.__base__

    def __hash__(cls) -> int:
        return hash(cls.__base__)


class CheckedComm(Checks, _Comm, metaclass=_Alike):  # type: ignore[misc]
    """An ``MPI.Intracomm`` whose ranks compare their calls. It has the handle of the one it is made from."""

    def __new__(cls, comm: Any = None) -> Any:
        return super().__new__(cls, comm)

    def __reduce__(self) -> Any:
        return (_world, ()) if self is MPI.COMM_WORLD else super().__reduce__()


def _world() -> Any:
    return MPI.COMM_WORLD


_CLASSES = {kind: _Alike(f"Checked{kind.__name__}", (Checks, kind), {}) for kind in MPI.Topocomm.__subclasses__()}
_CLASSES[_Comm] = CheckedComm


def open_checks(comm: Any, made_by: str, timeout: float | None = None, warn_after: float | None = None) -> Any:
    """Begin the checks of a communicator that is no result of a checked one. Collective."""
    config = Config.read(timeout=timeout, warn_after=warn_after)
    group = connect(_Comm(comm), config)
    atexit.register(_end_at_exit)
    return comm.begin_checks(config, made_by, group)


def _end_at_exit() -> None:
    if not MPI.Is_finalized():
        end_checks()
