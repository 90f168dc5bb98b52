"""A communicator of the ranks of a test, over any transport, and what numpy makes of their arrays in one process."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpikv.cluster.agreement import Agreement
from mpikv.cluster.calls import Call
from mpikv.cluster.process_group import ProcessGroup
from mpikv.cluster.status_board import StatusBoard
from mpikv.cluster.waiting import Waiting
from mpikv.collectives.collectives import Collectives
from mpikv.collectives.communicator import Communicator
from mpikv.collectives.operations import Op
from mpikv.config import Config
from mpikv.engine.plan import digest
from mpikv.protocols import Array, Transport
from mpikv.transports import open_transport
from mpikv.transports.shm import ShmTransport

LIMIT = 4096

FUNCTIONS = {
    Op.SUM: np.add,
    Op.MEAN: np.add,
    Op.PRODUCT: np.multiply,
    Op.MIN: np.minimum,
    Op.MAX: np.maximum,
    Op.BAND: np.bitwise_and,
    Op.BOR: np.bitwise_or,
    Op.BXOR: np.bitwise_xor,
}


class Ranks:
    """A communicator of the ranks of a test. All methods are collective."""

    def __init__(
        self, comm: Any, transport: str = "auto", hosts_of: int = 0, timeout: float = 20.0, **shm: Any
    ) -> None:
        """``shm`` are more arguments of the transport of one host."""
        self.group = ProcessGroup(comm, hosts_of, timeout)
        self.board = StatusBoard(self.group)
        config = Config(transport=transport, bucket_bytes=LIMIT, timeout=timeout)
        if transport == "shm":
            self.transport: Transport = ShmTransport(self.group, LIMIT, Waiting(timeout), **shm)
        else:
            self.transport = open_transport(self.group, config, self.board.warn)
        agreement = Agreement(self.transport.control, self.group, self.board)
        self.communicator = Communicator(Collectives(self.transport), agreement, self.group)
        self.rank, self.size = self.group.rank, self.group.size

    def close(self) -> None:
        self.communicator.collectives.close()
        self.transport.close()
        self.board.close()
        self.group.close()

    def call(self, verb: str, *arguments: Any, message: Sequence[Array] = ()) -> None:
        """Make a call on which ranks agree; a verb of a message takes whether it is staged."""
        move = getattr(self.communicator.collectives, verb)
        call = Call(verb, digest(verb), "")
        self.communicator.call(call, lambda staged: move(*arguments, *[staged] * bool(message)), *message)


def brought(dtype: np.dtype[Any], size: int, *seed: int) -> Array:
    """Return small whole numbers, whose sums and products are exact in any order."""
    return np.random.default_rng(seed).integers(0 if dtype.kind in "bu" else -3, 4, size).astype(dtype)


def reduce_of(op: Op, arrays: Sequence[Array]) -> Array:
    """Return the reduction that numpy makes: in float32 for half precision, and rounded once."""
    dtype = arrays[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize == 2 and dtype.kind not in "iu" else dtype
    result = FUNCTIONS[op].reduce(np.stack([array.astype(wide) for array in arrays]), dtype=wide)
    return (result / wide.type(len(arrays)) if op is Op.MEAN else result).astype(dtype)
