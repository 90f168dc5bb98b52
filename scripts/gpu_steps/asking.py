"""Questions to NCCL that may hang or kill: each is asked in processes of its own, with a limit, and every outcome is an
answer. Their ranks find each other by files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .step import SCRIPT, Numbers, Variables, prepare

PATIENCE = 20.0
RAISED = "ended with status"


@dataclass(frozen=True)
class Peer:
    """A rank of a question."""

    rank: int
    size: int
    folder: Path

    def meet(self, name: str) -> None:
        """Wait until all ranks are here. The limit of the question ends it."""
        (self.folder / f"{name}-{self.rank}").touch()
        while not all((self.folder / f"{name}-{rank}").exists() for rank in range(self.size)):
            time.sleep(0.002)

    def identity(self, nccl: Any) -> bytes:
        """Return the id of a communicator, which the first rank makes."""
        path = self.folder / "identity"
        if self.rank == 0:
            path.with_suffix(".new").write_bytes(nccl.get_unique_id())
            path.with_suffix(".new").rename(path)
        self.meet("identity")
        return path.read_bytes()

    def communicator(self) -> tuple[Any, Any]:
        """Return NCCL and a communicator of all ranks, on this rank's GPU."""
        import cupy

        from mpikv.compute.cuda.gpu import find_nccl

        nccl = find_nccl()
        cupy.cuda.Device(self.rank % cupy.cuda.runtime.getDeviceCount()).use()
        return nccl, nccl.NcclCommunicator(self.size, self.identity(nccl), self.rank)


@dataclass(frozen=True)
class Question:
    """What each rank runs, which returns its answer."""

    run: Callable[[Peer], Any]
    ranks: int = 1
    seconds: float = PATIENCE
    environ: Variables = field(default_factory=dict)
    one_gpu: bool = False


def answers(name: str, question: Question) -> list[Any]:
    """Return what each rank answers, or how it ended instead.

    Raises:
        AssertionError: a rank has raised what is no answer.
    """
    with asked(name, question.ranks) as collect:
        return checked(collect(question.seconds))


def answers_of_all(questions: dict[str, Question]) -> Numbers:
    """Return the answers to questions of one rank each, which are asked at the same time."""
    with ExitStack() as stack:
        collecting = {name: stack.enter_context(asked(name, 1)) for name in questions}
        end = time.monotonic() + max(question.seconds for question in questions.values())
        found = {name: collect(end - time.monotonic())[0] for name, collect in collecting.items()}
    checked(found.values())
    return found


def checked(found: Collection[Any]) -> list[Any]:
    """Return answers, unless one is an exception: a mistake of ours, or what nobody has thought of."""
    assert not any(str(answer).startswith(RAISED) for answer in found), "\n".join(map(str, found))
    return list(found)


@contextmanager
def asked(name: str, ranks: int) -> Iterator[Callable[[float], list[Any]]]:
    """Ask, and give what waits for the answers; in the end no process is left."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        peers = [
            subprocess.Popen(
                [sys.executable, SCRIPT, "--ask", name, str(rank), folder],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            yield lambda seconds: [_answer(peer, end_at) for end_at in [time.monotonic() + seconds] for peer in peers]
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()


def _answer(peer: subprocess.Popen[str], end_at: float) -> Any:
    try:
        said, _ = peer.communicate(timeout=max(0.1, end_at - time.monotonic()))
    except subprocess.TimeoutExpired:
        peer.kill()
        said, _ = peer.communicate()
        return answer_in(said, None)
    return answer_in(said, peer.returncode)


def answer_in(said: str, status: int | None) -> Any:
    r"""Return what a rank has answered, or how it ended instead. It counts, if it was given before a rank hung.

    >>> answer_in('noise\n{"answer": "works"}\n', 0), answer_in("", None), answer_in("Segmentation fault", -11)
    ('works', 'hangs', 'was ended by signal 11: Segmentation fault')
    """
    found = [line for line in said.splitlines() if line.startswith('{"answer"')]
    if found:
        answer = json.loads(found[-1])["answer"]
        return answer if status is not None else f"{answer}, then hangs"
    if status is None:
        return "hangs"
    how = f"was ended by signal {-status}" if status < 0 else f"{RAISED} {status}"
    return f"{how}: {said.strip()[-800:]}".removesuffix(": ")


def answer(questions: dict[str, Question], arguments: Sequence[str]) -> None:
    """Answer a question on one rank, and end the process."""
    name, rank, folder = arguments
    question = questions[name]
    prepare(int(rank), question.ranks, question.environ, question.one_gpu)
    status = 1
    try:
        print(json.dumps({"answer": question.run(Peer(int(rank), question.ranks, Path(folder)))}), flush=True)
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        # At its end CuPy would destroy communicators, which may hang.
        os._exit(status)
