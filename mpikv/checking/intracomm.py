"""Communicators and requests of mpi4py with checks: subclasses, so that libraries take them.

They have the handles of the objects that they are made from. A method that is not here is mpi4py's own, unchecked:
persistent and neighbourhood collectives, windows, files, spawned processes, intercommunicators.
"""

from __future__ import annotations

import atexit
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial, wraps
from inspect import signature
from traceback import walk_tb
from typing import Any, TypeAlias

from ..cluster.connecting import connect
from ..cluster.mpi_library import load_mpi
from ..cluster.printing import log, until_read
from ..cluster.process_group import ProcessGroup
from ..cluster.tracebacks import place_here
from ..config import Config
from .check import Check, Describe, end_checks
from .facts import BUFFERS, OBJECTS, Facts, call_of, key_of, make_call, nothing, on_gpus

MPI: Any = load_mpi()
_Comm: Any = MPI.Intracomm
_Request: Any = MPI.Request
# MPI's own, by the name under which pickle looks for it: other objects are pickled as copies of it.
COMM_WORLD = MPI.COMM_WORLD
# Calls that a communicator keeps.
_MOST_CALLS = 4096

_Run: TypeAlias = Callable[..., Any]
"""Makes a checked call."""


class _Alike(type):
    """Makes a class equal to the class of MPI that it checks, with the same instances.

    Programs compare types, and under ``--check`` :class:`CheckedRequest` has the name ``MPI.Request``.
    """

    def __eq__(cls, other: object) -> bool:
        """Return whether the other is this class, or MPI's class that it checks."""
        return other is cls or other is cls.__bases__[-1]

    def __hash__(cls) -> int:
        """Return the hash of MPI's class, since the two are equal."""
        return hash(cls.__bases__[-1])

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether an object is of MPI's class, with checks or without."""
        return isinstance(instance, cls.__bases__[-1])

    def __subclasscheck__(cls, subclass: type) -> bool:
        """Return whether a class is MPI's class, or made from that."""
        return issubclass(subclass, cls.__bases__[-1])


class CheckedRequest(_Request, metaclass=_Alike):  # type: ignore[misc]  # MPI is loaded late, so of no known type
    """A request with the deadline, and the comparison, of the communicator that it comes from."""

    check: Check | None = None
    describe: Describe
    place: str
    number: int

    def __del__(self) -> None:
        """Have the check remember, for the log at the end, that nobody waited for this request."""
        if bool(self) and self.check is not None:  # nobody has waited for it
            self.check.drop(self)


def _with_checks(requests: Iterable[Any]) -> list[Any]:
    """Return a list of the checked requests whose handle is not null yet, even if MPI has completed them. Local."""
    return [request for request in requests if getattr(request, "check", None) and request]


def _wait_for_all(requests: Iterable[Any]) -> None:
    """Wait until the checked requests are done; first compare nonblocking calls up to them. Frees no request."""
    for request in _with_checks(requests):
        request.check.await_request(request, partial(_Request.Get_status, request))


def _wait_for_any(requests: Sequence[Any]) -> None:
    """Wait until a request is done, if all that are not null have checks; else return at once, as MPI waits."""
    checked = _with_checks(requests)

    def describe() -> tuple[str, Sequence[int]]:
        """Return the wait in words, and all ranks that it may wait for."""
        those = [request.describe() for request in checked]
        return f"any of {len(those)} requests, the first {those[0][0]}", sorted({p for _, each in those for p in each})

    # Others complete without the checks: then MPI waits.
    if checked and len(checked) == sum(map(bool, requests)):
        checked[0].check.wait(lambda: any(map(_Request.Get_status, checked)), describe, requests)


def _look_at(requests: Iterable[Any]) -> None:
    """Compare nonblocking calls that all ranks have made where these requests are from. Local, unless they differ."""
    for request in _with_checks(requests):
        request.check.look()


def _precede(names: str, first: Callable[[Any], None], many: bool) -> None:
    """Define these methods of CheckedRequest: each calls ``first`` with its request, or requests, then MPI's method."""
    for name in names.split():
        raw: Any = getattr(_Request, name)

        # With many, the class comes before the requests.
        def method(it: Any, *given: Any, raw: Any = raw, **named: Any) -> Any:
            """Call ``first`` with the request or requests, then MPI's method, and return its result."""
            first((given[0] if given else named["requests"]) if many else (it,))
            return raw(*given, **named) if many else raw(it, *given, **named)

        preceded: Any = wraps(raw)(method)
        setattr(CheckedRequest, name, classmethod(preceded) if many else preceded)


_precede("Wait wait", _wait_for_all, many=False)
_precede("Test test", _look_at, many=False)
_precede("Waitall waitall", _wait_for_all, many=True)
_precede("Waitany waitany Waitsome waitsome", _wait_for_any, many=True)
_precede("Testall testall Testany testany Testsome testsome", _look_at, many=True)


class CheckedMethods:
    """The checked methods of a communicator. Without a :class:`Check`, as of ``MPI.COMM_NULL``, all are MPI's own."""

    check: Check | None = None

    def begin_checks(self: Any, config: Config, made_by: str, group: ProcessGroup | None = None) -> Any:
        """Begin checks of this communicator's calls from now on, and return it. Collective over it."""
        group = group or ProcessGroup(_Comm(self), config.simulate_ranks_per_host, config.timeout)
        self.check = Check(group, config, made_by)
        return self


def _add(names: str, make: Callable[[str, Any], _Run]) -> None:
    """Define these methods of CheckedMethods: ``make`` returns each, given its name and MPI's own method. Local."""
    for name in names.split():
        plain = getattr(_Comm, name)
        setattr(CheckedMethods, name, wraps(plain)(make(name, plain)))


def _unless_free(run: _Run) -> Callable[[str, Any], _Run]:
    """Return a function that makes a method: ``run`` with checks, NCCL for arrays of GPUs, else MPI's own. Local."""

    def make(name: str, plain: Any) -> _Run:
        """Return the method of this name; ``plain`` is MPI's own."""

        def method(self: Any, *given: Any, **named: Any) -> Any:
            """Without checks call MPI's own method, with an array of a GPU NCCL's, else ``run``; return its result."""
            if self.check is None:
                return plain(self, *given, **named)
            if name[0].isupper() and on_gpus((*given, *named.values())):
                return _run_on_gpus(name, self, *given, **named)
            return run(name, plain, self, *given, **named)

        return method

    return make


def _run_on_gpus(*given: Any, **named: Any) -> None:
    """Make a checked call on arrays of GPUs by NCCL; the first call imports that code. Collective, if the call is."""
    from .gpus import call  # most programs have nothing there

    call(*given, **named)


def _nonblocking(name: str) -> str:
    """Return the name of a call's nonblocking form: "Ibcast" for "Bcast", "isend" for "send". Local."""
    return ("I" if name[0].isupper() else "i") + name.lower()


_start_of = cache(lambda name: getattr(_Comm, _nonblocking(name)))


def _collective(verb: str, plain: Any, facts: Callable[..., Facts] = nothing, posts: bool = False) -> _Run:
    """Return a method that compares a collective call, raises if ranks differ, then makes it; GPU buffers by NCCL.

    ``posts``: a nonblocking one, compared later.
    """
    # Objects are pickled, wherever their arrays lie, and say nothing of the call.
    of_buffers = verb[0].isupper()
    first = 1 if of_buffers else 2

    # The communicator is the first argument: to put it before the others again takes time.
    def run(*given: Any, **named: Any) -> Any:
        """Compare a call and return MPI's result; or start it, to be compared later, and return its request."""
        if (check := given[0].check) is None:
            return plain(*given, **named)
        key = None
        if len(given) >= first:  # else an object is given by name
            key = key_of(verb, (*given[first:], *named, *named.values()) if named else given[first:])
        if (call := check.calls.get(key)) is None:
            if of_buffers and on_gpus((*given[1:], *named.values())):
                return _run_on_gpus(verb, *given, **named)
            call = make_call(verb, facts, given, named)
            if key:
                if len(check.calls) >= _MOST_CALLS:
                    check.calls.clear()
                check.calls[key] = call
        if posts:
            return check.post(call, lambda: CheckedRequest(plain(*given, **named)), sys._getframe(1))
        check.begin(call)
        try:
            return plain(*given, **named) if named else plain(*given)  # the shorter one is faster
        except Exception as error:
            if _is_refused(error):
                check.refused = call
            raise
        finally:
            check.leave()

    return run


def _is_refused(error: Exception) -> bool:
    """Return whether mpi4py raised an error before it called MPI: where it reads arguments, or pickles an object."""
    frames = " ".join(frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__))
    return not isinstance(error, MPI.Exception) and bool(re.search(r"pickle_dump|_p_msg_|Comm\.\w+$", frames))


_signature = cache(lambda name: signature(getattr(_Comm, name)))


def _bind(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a call's arguments by their names, with the defaults for those that the program left out. Local."""
    bound = _signature(name).bind(None, *given, **named)
    bound.apply_defaults()
    return bound.arguments


def _describing(comm: Any, name: str, *given: Any, **named: Any) -> Describe:
    """Return a function that describes a message: its call, peers and tag, and the ranks that it waits for. Local."""

    def describe() -> tuple[str, Sequence[int]]:
        """Return the message in words, and the other ranks that it may wait for."""
        arguments, words, peers = _bind(name, given, named), list[str](), set[int]()
        for key, way in (("dest", "to"), ("source", "from")):
            if (rank := arguments.get(key)) is not None:
                words.append(f"{way} any rank" if rank == MPI.ANY_SOURCE else f"{way} rank {rank}")
                peers.update(range(comm.size) if rank == MPI.ANY_SOURCE else (rank,))
        tags = [tag for key, tag in arguments.items() if key.endswith("tag") and tag != MPI.ANY_TAG]
        about = ", ".join([*words, *(f"tag {tag}" for tag in tags[:1])])
        return f"{name}({about})", sorted(peers - {comm.rank, MPI.PROC_NULL})

    return describe


@_unless_free
def _call_and_wait(name: str, plain: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Make a blocking send, or receive into a buffer, by its nonblocking form, and wait with the deadline."""
    # The place of the status, which the nonblocking call lacks.
    options, at = dict(named), len(_signature(_nonblocking(name)).parameters) - 1
    status = given[at] if len(given) > at else options.pop("status", None)
    try:
        request = _start_of(name)(self, *given[:at], **options)
    except NotImplementedError:  # an MPI before version 4 has no Isendrecv
        return plain(self, *given, **named)
    test = partial(request.Test, status)
    if not test():
        self.check.wait(test, _describing(self, name, *given, **named), request)
    return None


@_unless_free
def _probe(name: str, plain: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Wait with the deadline until a message can be received, and return the probe's result; receive nothing."""
    return self.check.wait(partial(_start_of(name), self, *given, **named), _describing(self, name, *given, **named))


@_unless_free
def _receive_object(name: str, plain: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Wait for a message with the deadline, then receive it, and return its object."""
    way = _bind(name, given, named)
    buf, source, tag, status = (way[key] for key in ("buf", "source", "tag", "status"))
    # Not irecv: without a buffer it takes messages up to 32 KiB only.
    probe = _Comm.improbe if buf is None else _Comm.iprobe
    found = self.check.wait(partial(probe, self, source, tag), _describing(self, name, *given, **named))
    return found.recv(status) if buf is None else plain(self, buf, source, tag, status)


@_unless_free
def _exchange_objects(name: str, plain: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Send an object and receive one, both with the deadline; return the received one."""
    way = _bind(name, given, named)
    send = _Comm.isend(self, way["sendobj"], way["dest"], way["sendtag"])
    received = self.recv(way["recvbuf"], way["source"], way["recvtag"], way["status"])
    self.check.wait(send.Test, _describing(self, "send", None, way["dest"], way["sendtag"]), send)
    return received


@_unless_free
def _start_message(name: str, plain: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Start a nonblocking message, and return its request, to be waited for with the deadline. Local."""
    # Without the buffer or object, which would live as long as the description.
    place = {key: value for key, value in named.items() if key not in ("buf", "obj")}
    describe = _describing(self, name, None, *given[1:], **place)
    return self.check.track(CheckedRequest(plain(self, *given, **named)), describe, sys._getframe(2))


@_unless_free
def _make_communicator(name: str, plain: Any, self: Any, *given: Any, **named: Any) -> Any:
    """Compare the call, but not Create_group; return the new communicator with checks, or COMM_NULL. Collective."""
    if name != "Create_group":  # other ranks do not call it
        self.check.begin(call_of(name, ()))
    made = plain(self, *given, **named)
    return made if made == MPI.COMM_NULL else _CLASSES[type(made)](made).begin_checks(self.check.config, name)


@_unless_free
def _free_communicator(name: str, plain: Any, self: Any) -> None:
    """Compare the call, end the checks, and free the communicator. Collective."""
    check, self.check = self.check, None
    check.begin(call_of(name.capitalize(), ()))
    check.close()
    plain(self)


@_unless_free
def _abort(name: str, plain: Any, self: Any, errorcode: int = 0) -> None:
    """Log this rank and the place of the call, and end the job."""
    if not sys._getframe(2).f_globals["__name__"].startswith("mpikv."):  # else the reason is printed already
        log("rank %d calls Abort(%d)%s", self.rank, errorcode, place_here())
        until_read()
    plain(self, errorcode)


for _name, _facts in BUFFERS.items():
    _add(_name, partial(_collective, facts=_facts))
    _add(_nonblocking(_name), partial(_collective, facts=_facts, posts=True))
for _name, _facts in OBJECTS.items():
    _add(_name, partial(_collective, facts=_facts))
_add("barrier", lambda name, plain: _collective("Barrier", plain))  # the two names of one call
_add("Send Ssend send ssend Recv Sendrecv Sendrecv_replace", _call_and_wait)
# MPI's own, unchecked, but for arrays of GPUs.
_passed = _unless_free(lambda _, own, *given, **named: own(*given, **named))
_add(f"Bsend Rsend {' '.join(each for each in dir(_Comm) if each.endswith('_init'))}", _passed)
_add("Probe Mprobe probe mprobe", _probe)
_add("recv", _receive_object)
_add("sendrecv", _exchange_objects)
_add("Isend Issend Ibsend Irsend Irecv isend issend ibsend irecv", _start_message)
_add("Dup Dup_with_info Clone Create Split Split_type", _make_communicator)
_add("Create_group Create_cart Create_graph Create_dist_graph Create_dist_graph_adjacent", _make_communicator)
_add("Free Disconnect free", _free_communicator)
_add("Abort", _abort)


class CheckedComm(CheckedMethods, _Comm, metaclass=_Alike):  # type: ignore[misc]  # as above
    """An ``MPI.Intracomm`` whose ranks compare their calls. It has the handle of the one it is made from."""

    __module__ = "mpi4py.MPI"  # where pickle looks for the name

    def __reduce__(self) -> Any:
        """Return the name of COMM_WORLD, so that pickle finds it; other communicators are pickled as MPI's."""
        return "COMM_WORLD" if self is MPI.COMM_WORLD else super().__reduce__()


_CLASSES = {
    kind: _Alike(f"Checked{kind.__name__}", (CheckedMethods, kind), {}) for kind in MPI.Topocomm.__subclasses__()
}
_CLASSES[_Comm] = CheckedComm


def open_checks(comm: Any, made_by: str, timeout: float | None = None, warn_after: float | None = None) -> Any:
    """Begin the checks of a CheckedComm, and return that communicator; they end at exit at the latest. Collective."""
    # Sums on GPUs are as MPI's: in any order, and of half precision rounded at each addition.
    config = Config.read(timeout=timeout, warn_after=warn_after, deterministic=False, native_halves=True)
    group = connect(_Comm(comm), config)
    atexit.register(end_checks)
    return comm.begin_checks(config, made_by, group)
