"""The seam to CuPy, where there is no GPU: which one is chosen, what is said when something is missing, and whose turn
it is to copy. On a GPU, or an emulated one, ``tests/gpu/real/test_gpu.py`` goes on.
"""

import ctypes
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
from support.commands import ROOT, python

import mpikv
from mpikv.cli.gpus import survey
from mpikv.cli.info import _gpu_rows
from mpikv.cli.nccl_faults import faults_of
from mpikv.cluster.environment import Launch
from mpikv.compute.cuda.gpu import Staging, choose_gpu, find_gpu, find_nccl, gpu_of
from mpikv.compute.cuda.sharing import sharing
from mpikv.errors import TransportUnavailable, Unsupported

needs_cupy = pytest.mark.skipif(not find_spec("cupy"), reason="CuPy is not installed")


def test_an_emulated_gpu_without_a_compiler():
    command = [sys.executable, ROOT / "tests/support/cuda", "echo", "it runs"]
    ended = subprocess.run(command, env={"PATH": ""}, capture_output=True, text=True, timeout=18, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "needs the compiler cc, and it is missing" in ended.stderr


# --- Which GPU


@pytest.mark.parametrize(
    ("count", "local_rank", "local_size", "sharing", "visible", "expected"),
    [
        (1, 0, 1, False, None, 0),
        (8, 5, 8, False, None, 5),
        (8, 5, 6, False, "0,1,2,3,4,5,6,7", 5),
        (1, 3, 4, False, "3", 0),  # a launcher shows each rank its own
        (1, 3, 4, False, "MIG-4a5f", 0),
        (1, 3, 4, True, None, 0),
        (2, 3, 4, True, None, 1),
        (4, 3, 4, True, None, 3),
    ],
)
def test_a_rank_has_the_gpu_of_its_number(count, local_rank, local_size, sharing, visible, expected):
    assert choose_gpu(count, local_rank, local_size, sharing, visible) == expected


def test_too_few_gpus():
    with pytest.raises(
        TransportUnavailable, match=r"^the 4 ranks of this host need one GPU each and see 2; start 2 per host"
    ):
        choose_gpu(2, 0, 4, False, None)
    with pytest.raises(TransportUnavailable, match=r"see 2 of CUDA_VISIBLE_DEVICES='0,1'; .*MPIKV_GPU_SHARING=1"):
        choose_gpu(2, 3, 4, False, "0,1")


# --- What is missing


def test_without_cupy(hide):
    hide("cupy")
    for find in (lambda: find_gpu(0, 1), find_nccl):
        with pytest.raises(TransportUnavailable, match=r"need the package CuPy .*pip install 'mpikv\[cuda13\]'"):
            find()
    found = survey()
    assert (found.cupy, found.nccl, found.devices, len(found.problems)) == (None, None, [], 1)
    with mpikv.create() as kv:
        kv.init("w", np.ones(3))
        with pytest.raises(TransportUnavailable, match="push: arrays of GPUs need the package CuPy"):
            kv.push("w", SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (2, 0)))
        with pytest.raises(Unsupported, match=r"an unknown DLPack device \(8, 0\)"):
            kv.push("w", SimpleNamespace(__dlpack__=None, __dlpack_device__=lambda: (8, 0)))


def run(code: str, **variables: str) -> tuple[str, float]:
    """Return what a new process prints, which must say nothing else, and the seconds after the import of CuPy."""
    code = f"import time, cupy; begin = time.perf_counter(); {code}; print(time.perf_counter() - begin)"
    done = python("-c", code, timeout=18, PATH="", HOME="/nowhere", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    *lines, seconds = done.stdout.splitlines()
    return "\n".join(lines), float(seconds)


@needs_cupy
def test_without_a_gpu():
    use = "gpu.find_gpu(0, 1, visible='')"
    code = f"import mpikv\nfrom mpikv.compute.cuda import gpu\ntry: {use}\nexcept mpikv.MPIKVError as e: print(e)\n"
    text, seconds = run(f"exec({code!r})", CUDA_VISIBLE_DEVICES="")
    assert re.search(r"^CuPy \S+ is installed, but no GPU can be used here \(.+, with CUDA_VISIBLE_DEVICES=''\)", text)
    assert re.search("install NVIDIA's driver, 580 or newer|nvidia-smi lists the GPUs", text)
    assert seconds < 1


@needs_cupy
def test_without_nccl():
    """The library is there, but what loads it fails as where it is not."""
    code = """
import sys, mpikv, mpikv.compute.cuda.gpu
class Missing:
    def find_spec(self, name, *others):
        if name == "cupy_backends.cuda.libs.nccl":
            raise ImportError("libnccl.so.2: cannot open shared object file")
sys.meta_path.insert(0, Missing())
try: mpikv.compute.cuda.gpu.find_nccl()
except mpikv.MPIKVError as e: print(e)
"""
    text, seconds = run(f"exec({code!r})")
    assert re.search(r"^CuPy \S+ cannot load the library NCCL \(ImportError \(libnccl.so.2: cannot open", text)
    assert re.search(r"pip install 'mpikv\[cuda1[23]\]'$", text)
    assert seconds < 1


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (22707, ""),
        (22803, "NCCL 2.28.3: PyTorch has passed over"),
        (22808, r"pip install 'mpikv\[cuda12\]'$"),
        (22809, ""),
        (22902, "sums may hang"),
        (23007, ""),
        (23102, "destroyed only after an abort "),
        (23203, "NCCL 2.32.3: from 2.31.2 on"),
    ],
)
def test_versions_of_nccl_with_known_faults(imported, monkeypatch, version, said):
    imported.cuda.runtime.runtimeGetVersion = lambda: 12090
    monkeypatch.setattr("mpikv.cli.gpus.find_nccl", lambda: SimpleNamespace(get_version=lambda: version))
    found = survey()
    assert (found.nccl, found.problems) == (f"2.{version // 100 % 100}.{version % 100}", [])
    assert len(found.warnings) == bool(said)
    assert re.search(said, "".join(found.warnings))
    rows = _gpu_rows(found._asdict())
    assert rows[1:] == [("warning", text) for text in found.warnings]


def test_a_fresh_installation_has_none_of_them():
    text = (ROOT / "pyproject.toml").read_text()
    (wanted,) = set(re.findall(r'"nvidia-nccl-cu1[23](.*?)"', text))
    low, high = (int(minor) * 100 + int(patch) for minor, patch in re.findall(r"2\.(\d+)\.(\d+)", wanted))
    assert not any(faults_of(20000 + number, 13) for number in range(low, high))


@needs_cupy
def test_cupy_takes_memory_that_another_library_lends_for_an_arrays_own():
    """So neither of both may be asked whether arrays lie apart."""
    import cupy

    host = np.zeros(64, np.uint8)
    own, lent = (
        cupy.ndarray((8,), "f4", cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(begin, 64, host, 0), offset))
        for begin, offset in ((host.ctypes.data, 32), (host.ctypes.data + 32, 0))
    )
    assert own.data.ptr == lent.data.ptr
    assert lent.flags.owndata
    assert not np.may_share_memory(own, lent)


# --- Copies


def test_threads_take_turns():
    """A thread that comes while another waits for a piece of pinned memory does not take it."""
    queue: list[Callable[[], object]] = []
    threads: list[threading.Thread] = []
    arrays = [np.full(size, number + 1, np.uint8) for number, size in enumerate((20, 12, 9, 17))]
    targets = [np.zeros_like(array) for array in arrays]

    def synchronize(behind: int) -> None:
        """Meanwhile another thread copies, too."""
        if len(threads) < 3:
            threads.append(threading.Thread(target=send, args=(len(threads) + 1,)))
            threads[-1].start()
            threads[-1].join(0.2)
        for number in range(behind):
            queue[number]()
            queue[number] = int

    def send(number: int) -> None:
        stage.upload(arrays[number], targets[number].ctypes.data)

    stage = Staging(
        [np.zeros(8, np.uint8) for _ in range(2)],
        lambda *copy: queue.append(partial(ctypes.memmove, *copy)),
        lambda: SimpleNamespace(synchronize=partial(synchronize, len(queue)), done=True),
    )
    send(0)
    for thread in threads:
        thread.join()
    assert len(threads) == 3
    for copy in queue:
        copy()
    for target, array in zip(targets, arrays, strict=True):
        np.testing.assert_array_equal(target, array)


# --- A CuPy of which nothing but what is asked first is there


class Failure(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return what ``import cupy`` gives, where nothing has been told NCCL."""
    runtime = SimpleNamespace(
        CUDARuntimeError=Failure,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda ordinal: {"uuid": bytes(range(1, 20)), "name": b"Stand-in"},
        deviceGetPCIBusId=lambda ordinal: f"0000:0{ordinal}:00.0",
        getDevice=lambda: made.present,
    )

    def use(ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(use=lambda: setattr(made, "present", ordinal))

    cuda = SimpleNamespace(runtime=runtime, Device=use)
    made = SimpleNamespace(__version__="14", ndarray=np.ndarray, cuda=cuda, present=0)
    monkeypatch.setitem(sys.modules, "cupy", made)
    made.environ = {}
    monkeypatch.setattr("mpikv.compute.cuda.sharing.os", made)
    return made


def test_what_to_do_without_a_driver_or_a_gpu(imported):
    for status, advice in (
        (35, "status 35); install NVIDIA's driver, 580 or newer, or CuPy for CUDA 12 ('mpikv[cuda12]')"),
        (100, "status 100); nvidia-smi lists"),
    ):

        def failing(status=status):
            raise Failure(status)

        imported.cuda.runtime.getDeviceCount = failing
        with pytest.raises(TransportUnavailable, match=re.escape(advice)):
            find_gpu(0, 1)


def test_an_array_of_a_gpu_that_cannot_be_used(imported):

    def without_driver(ordinal):
        raise Failure(35)

    imported.cuda.runtime.getDeviceProperties = without_driver
    for _ in range(2):
        with pytest.raises(TransportUnavailable, match="the array is on cuda:7, which cannot be used here: status"):
            gpu_of(SimpleNamespace(__dlpack_device__=lambda: (2, 7)))


@pytest.mark.parametrize("name", ["NCCL_HOSTID", "NCCL_MULTI_RANK_GPU_ENABLE"])
def test_ranks_that_share_a_gpu_tell_nccl_before_cupy_is_used(imported, monkeypatch, name):
    environ = imported.environ
    environ["NCCL_PROTO"] = "LL"
    monkeypatch.setattr("mpikv.compute.cuda.gpu.launch_of", lambda: Launch("a launcher", 6, 5))
    imported.cuda.runtime.getDeviceCount = lambda: len(environ) > 10 or name in environ
    assert find_gpu(1, 2, sharing=True).name == "cuda:0"
    # Of all hosts; what somebody has chosen stays.
    assert environ == {**sharing(5), "NCCL_PROTO": "LL"}
    environ.clear()
    environ[name] = "1"
    assert find_gpu(1, 2, sharing=True).name == "cuda:0"
    assert environ == {name: "1"}


def test_the_gpu_of_a_rank(imported):
    assert find_gpu(1, 2).name == "cuda:1"
    assert imported.present == 1
    with pytest.raises(TransportUnavailable, match="the 3 ranks of this host need one GPU each and see 2"):
        find_gpu(1, 3)
    assert find_gpu(2, 3, sharing=True).name == "cuda:0"
    imported.cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(TransportUnavailable, match="no GPU can be used here"):
        find_gpu(0, 1)


# --- The example


@pytest.mark.parametrize("writable", [True, False])
def test_the_example_says_what_is_missing(tmp_path, writable):
    pytest.importorskip("sklearn")
    (tmp_path / "file").touch()
    cache = tmp_path / ("cache" if writable else "file/no folder")
    environ = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "CUPY_CACHE_DIR": str(cache)}
    done = python(ROOT / "scripts/train_digits.py", "--device", "gpu", "--epochs", "1", timeout=18, **environ)
    assert (done.returncode, done.stdout) == (1, "")
    why = "no GPU can be used here" if writable else "CUPY_CACHE_DIR"
    assert re.fullmatch(rf"train_digits\.py: create: .*(need the package CuPy|{why}).*\n", done.stderr)
