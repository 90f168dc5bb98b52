"""What NCCL does where its documentation leaves it open, or where ranks fail: questions for :mod:`.asking`."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from .asking import Peer, Question, answers, answers_of_all
from .communicators import library
from .step import MB, Numbers

UNDEFINED = -(1 << 31)
SHRINK_ABORT = 1
# Seconds in which NCCL may say that a rank is lost.
LOSS = 8.0


class Config(ctypes.Structure):
    """The first 72 bytes of ``ncclConfig_t``, as of 2.27.7, which later versions take as well."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
        ("traffic_class", ctypes.c_int),
        ("comm_name", ctypes.c_char_p),
        ("collnet_enable", ctypes.c_int),
        ("cta_policy", ctypes.c_int),
        ("shrink_share", ctypes.c_int),
        ("nvls_ctas", ctypes.c_int),
    )

    @classmethod
    def named(cls, name: str) -> Config:
        numbers = [field for field, kind in cls._fields_ if kind is ctypes.c_int]
        given = dict.fromkeys(numbers, UNDEFINED)
        return cls(ctypes.sizeof(cls), 0xCAFEBEEF, 22707, comm_name=name.encode(), **given)


class Identity(ctypes.Structure):
    """``ncclUniqueId``."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Refused(Exception):
    """A function is not there, or returned an error."""


def call(name: str, *arguments: Any) -> None:
    """Call a function of NCCL by ctypes."""
    try:
        function = getattr(library(), name)
    except AttributeError:
        raise Refused(f"absent: {name}") from None
    if status := function(*arguments):
        raise Refused(f"error {status} of {name}")


def answering(run: Callable[[Peer], None]) -> Callable[[Peer], str]:
    """Return what answers "works" where nothing is refused."""

    def answer(peer: Peer) -> str:
        try:
            run(peer)
        except Refused as refusal:
            return str(refusal)
        return "works"

    return answer


def check_sum(handle: int, rank: int, size: int) -> None:
    """Add with a communicator that is known by its handle."""
    import cupy

    array, stream = cupy.full(MB, rank + 1, "f4"), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    add(handle, array.data.ptr, array.size, stream.ptr)
    stream.synchronize()
    if not (array.get() == size * (size + 1) / 2).all():
        raise Refused("wrong sums")


def add(handle: int, address: int, count: int, stream: int) -> None:
    """Queue an allReduce of float32 in place."""
    from mpikv.compute.cuda.gpu import find_nccl

    nccl, place = find_nccl(), ctypes.c_void_p(address)
    kind = nccl.NCCL_FLOAT32, nccl.NCCL_SUM
    call("ncclAllReduce", place, place, ctypes.c_size_t(count), *kind, ctypes.c_void_p(handle), ctypes.c_void_p(stream))


# --- One rank each


def last_error(peer: Peer) -> str:
    """What ncclGetLastError says after a call that is refused."""
    from mpikv.transports.nccl import last_error as said

    nccl, comm = peer.communicator()
    try:
        comm.allReduce(0, 0, 1, 99, 99, 0)
    except (nccl.NcclError, KeyError) as error:
        return f"works: {said()!r} after {error}"
    return "nothing was refused"


def finalize(peer: Peer) -> None:
    _, comm = peer.communicator()
    check_sum(comm.comm, 0, 1)
    call("ncclCommFinalize", ctypes.c_void_p(comm.comm))
    comm.destroy()


def named(peer: Peer) -> None:
    import cupy

    from mpikv.compute.cuda.gpu import find_nccl

    identity, handle, config = Identity(), ctypes.c_void_p(), Config.named("mpikv")
    ctypes.memmove(ctypes.byref(identity), find_nccl().get_unique_id(), ctypes.sizeof(identity))
    cupy.cuda.Device(0).use()
    call("ncclCommInitRankConfig", ctypes.byref(handle), 1, identity, 0, ctypes.byref(config))
    check_sum(handle.value or 0, 0, 1)
    call("ncclCommDestroy", handle)


def registered(peer: Peer) -> None:
    import cupy

    _, comm = peer.communicator()
    memory, registration, nbytes = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(4 * MB)
    own = ctypes.c_void_p(comm.comm)
    call("ncclMemAlloc", ctypes.byref(memory), nbytes)
    call("ncclCommRegister", own, memory, nbytes, ctypes.byref(registration))
    stream = cupy.cuda.Stream(non_blocking=True)
    add(comm.comm, memory.value or 0, MB, stream.ptr)
    stream.synchronize()
    call("ncclCommDeregister", own, registration)
    call("ncclMemFree", memory)
    comm.destroy()


def not_blocking(peer: Peer) -> str:
    """What CuPy makes of a communicator that is still in the making when NCCL returns."""
    from mpikv.compute.cuda.gpu import find_nccl

    nccl = find_nccl()
    try:
        comm = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    except (nccl.NcclError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    states = []
    for wait in (0.0, 1.0):
        time.sleep(wait)
        try:
            comm.check_async_error()
            states.append("ready")
        except (nccl.NcclError, KeyError) as error:
            states.append(f"{type(error).__name__}: {error}")
    return f"a communicator; at once {states[0]}; after a second {states[1]}"


# --- Several ranks


def duplicate(peer: Peer) -> str:
    """Ask NCCL for a communicator of two ranks on one GPU, without the settings for that."""
    from mpikv.compute.cuda.gpu import find_nccl
    from mpikv.transports.nccl import last_error as said

    nccl, begin = find_nccl(), time.perf_counter()
    try:
        peer.communicator()
    except (nccl.NcclError, KeyError) as error:
        return f"{type(error).__name__}: {error} ({said()}) after {time.perf_counter() - begin:.1f} s"
    return "a communicator"


def shrink(peer: Peer) -> str:
    """Ask NCCL alone whether three of four ranks can go on when the fourth was killed in a sum."""
    import cupy

    _, comm = peer.communicator()
    check_sum(comm.comm, peer.rank, peer.size)
    peer.meet("summed")
    last = peer.size - 1
    if peer.rank == last:
        os.kill(os.getpid(), signal.SIGKILL)
    array, stream = cupy.ones(MB, "f4"), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    add(comm.comm, array.data.ptr, array.size, stream.ptr)
    time.sleep(0.5)
    without, smaller = (ctypes.c_int * 1)(last), ctypes.c_void_p()
    begin = time.perf_counter()
    given = ctypes.c_void_p(comm.comm), without, 1, ctypes.byref(smaller), None, SHRINK_ABORT
    try:
        call("ncclCommShrink", *given)
        check_sum(smaller.value or 0, peer.rank, last)
    except Refused as refusal:
        return str(refusal)
    return f"works, in {time.perf_counter() - begin:.1f} s"


def loss(number: signal.Signals) -> Callable[[Peer], Any]:
    def lose(peer: Peer) -> Any:
        """Ask NCCL alone when it tells that a rank was killed, or stopped, in a sum, and whether an abort returns."""
        import cupy

        nccl, comm = peer.communicator()
        check_sum(comm.comm, peer.rank, peer.size)
        peer.meet("summed")
        array, stream = cupy.ones(4 * MB, "f4"), cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.get_current_stream().synchronize()
        if peer.rank:
            (peer.folder / "victim").write_text(str(os.getpid()))
            threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
        begin = time.perf_counter()
        told = "nothing"
        while time.perf_counter() - begin < LOSS and told == "nothing":
            time.sleep(0.001)
            try:
                if stream.done and time.perf_counter() - begin < 1:
                    add(comm.comm, array.data.ptr, array.size, stream.ptr)
                comm.check_async_error()
            except (nccl.NcclError, KeyError, Refused) as error:
                told = f"{type(error).__name__}: {error}"
        found: Numbers = {"told": told, "told_after_s": time.perf_counter() - begin, "sums_ended": stream.done}
        found |= aborted(comm, stream)
        os.kill(int((peer.folder / "victim").read_text()), signal.SIGKILL)
        return found

    return lose


def aborted(comm: Any, stream: Any) -> Numbers:
    """Abort a communicator, and say whether that returns, and the work that was queued ends."""
    import cupy

    begin, device = time.perf_counter(), cupy.cuda.get_device_id()

    def abort() -> None:
        cupy.cuda.Device(device).use()
        comm.abort()

    thread = threading.Thread(target=abort, daemon=True)
    thread.start()
    thread.join(5)
    found: Numbers = {"abort": "hangs" if thread.is_alive() else f"returns after {time.perf_counter() - begin:.2f} s"}
    while not stream.done and time.perf_counter() - begin < 10:
        time.sleep(0.01)
    return {**found, "sums_ended_after_abort": stream.done}


def graph(peer: Peer) -> str:
    """Record a sum of NCCL alone in a CUDA graph, launch it a hundred times, and end the communicator."""
    import cupy

    _, comm = peer.communicator()
    check_sum(comm.comm, peer.rank, peer.size)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        sent, out = cupy.zeros(MB, "f4"), cupy.zeros(MB, "f4")
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        cupy.cuda.runtime.memcpyAsync(
            out.data.ptr, sent.data.ptr, out.nbytes, cupy.cuda.runtime.memcpyDeviceToDevice, stream.ptr
        )
        add(comm.comm, out.data.ptr, out.size, stream.ptr)
        recorded = stream.end_capture()
        begin = time.perf_counter()
        for number in range(100):
            sent.fill(number + peer.rank)
            recorded.launch(stream)
            wanted = peer.size * number + peer.size * (peer.size - 1) / 2
            if not (out[:: MB // 8].get() == wanted).all():
                return f"wrong sums at launch {number}"
        taken = time.perf_counter() - begin
    del recorded
    peer.meet("launched")
    comm.destroy()
    return f"works, {10 * taken:.2f} ms for a launch"


ALONE = {
    "last_error": Question(last_error),
    "finalize": Question(answering(finalize)),
    "named_config": Question(answering(named)),
    "registered_memory": Question(answering(registered)),
    "not_blocking": Question(not_blocking, environ={"NCCL_COMM_BLOCKING": "0"}),
}
TOGETHER = {
    "duplicate_2": Question(duplicate, 2, environ={"NCCL_HOSTID": None}, one_gpu=True),
    "graph_by_nccl_2": Question(graph, 2, 25),
    "lost_by_kill_2": Question(loss(signal.SIGKILL), 2, 30),
    "lost_by_stop_2": Question(loss(signal.SIGSTOP), 2, 30),
    "shrink_4": Question(shrink, 4, 25),
}
QUESTIONS = {**ALONE, **TOGETHER}


def alone() -> Numbers:
    """Ask NCCL alone, on one rank, for functions and settings that CuPy lacks."""
    return answers_of_all(ALONE)


def together(name: str) -> Callable[[], Numbers]:
    def run() -> Numbers:
        return {f"rank {rank}": answer for rank, answer in enumerate(answers(name, TOGETHER[name]))}

    run.__doc__ = TOGETHER[name].run.__doc__
    return run
