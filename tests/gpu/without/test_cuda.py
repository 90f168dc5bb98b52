"""The CUDA sources without a GPU: what is refused before a kernel runs, and what the compiler makes of all kernels."""

import gc
import re
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.rules import LAYERWISE, RULES, plain

import mpikv
from mpikv import codecs, optimizers
from mpikv.compute.cuda import layerwise, loading
from mpikv.compute.cuda.kernels import CudaKernels
from mpikv.optimizers.recording import rule_of
from mpikv.optimizers.updaters import CallableUpdater

FLOAT = np.dtype(np.float32)
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *(*FLOATS, "complex64", "complex128"),
)


def test_cupy_is_loaded_late() -> None:
    code = "import sys, mpikv.compute.cuda.kernels, mpikv.compute.cuda.copies; assert 'cupy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def nothing_loaded() -> Iterator[None]:
    loading.load_kernel.cache_clear()
    yield
    loading.load_kernel.cache_clear()


@pytest.mark.usefixtures("nothing_loaded")
def test_without_cupy(hide: Any) -> None:
    hide("cupy")
    with pytest.raises(mpikv.TransportUnavailable, match=r"update<sgd_rule, float32_kind, one>.*pip install 'cupy"):
        CudaKernels().prepare(optimizers.SGD(), FLOAT, False)


class Sorting(optimizers.SGD):
    def rule(self, step: Any, block: Any) -> None:
        block.weight[:] = np.sort(block.gradient)


class Long(optimizers.SGD):
    def rule(self, step: Any, block: Any) -> None:
        for number in range(20):
            block.weight *= number


class Wide(optimizers.SGD):
    states = tuple("abcdefghi")

    def rule(self, step: Any, block: Any) -> None:
        np.copyto(block.weight, block.state[-1])


@pytest.mark.parametrize(
    ("updater", "dtype", "said"),
    [
        (Sorting(multi_precision=True), "f4", r"^the rule of Sorting cannot be compiled: it uses sort; write"),
        (Long(), "f4", r"it has more than 11 different numbers or 8 states: compute"),
        (Wide(), "f4", r"it has more than 11 different numbers or 8 states: compute"),
        (optimizers.SGD(), "i4", "SGD cannot update values of int32"),
    ],
)
def test_rules_that_are_refused_before_a_push(updater: Any, dtype: str, said: str) -> None:
    with pytest.raises(mpikv.Unsupported, match=said):
        CudaKernels().prepare(updater, np.dtype(dtype), False)


def test_updaters_that_work_by_themselves() -> None:
    """A function, and a subclass with an update of its own."""

    class Sideways(optimizers.LAMB):
        def update(self, step: Any, total: Any, value: Any, state: Any) -> None:
            value += total

    add = CallableUpdater(lambda key, received, stored: stored.__iadd__(received))
    for updater in (add, Sideways()):
        value = np.zeros(3, np.float32)
        CudaKernels().prepare(updater, FLOAT, False)
        CudaKernels().bind(updater, np.ones(3, np.float32), value, {})("key")
        assert value.tolist() == [1, 1, 1]


def test_codecs_without_a_kernel() -> None:
    class OfOnesOwn(codecs.TwoBit):
        pass

    own = OfOnesOwn(), codecs.ErrorFeedback(OfOnesOwn())
    for codec in (*own, *map(codecs.create, ("topk", "lowrank", {"type": "topk", "error_feedback": False}))):
        assert CudaKernels().codec(codec) is codec  # it works on the host


def test_a_launch_has_the_address_of_its_arguments_which_live_until_it_has_copied_them() -> None:
    """Also of those that nobody else refers to."""
    found = list[bool]()

    def function(grid: Any, block: Any, parameters: Any) -> None:
        gc.collect()
        found.append(parameters == (address,) and alive() is not None)

    def given() -> tuple[Any]:
        nonlocal alive, address
        made = np.zeros(1, loading.argument_dtype("rows.cu", "Rows"))
        alive, address = weakref.ref(made), made.ctypes.data
        return (made,)

    alive, address = weakref.ref(function), 0
    loading._by_address("name", function, int)((1,), (1,), given())
    assert found == [True]
    assert alive() is None


# --- NVRTC


def expressions(name: str) -> list[str]:
    """Return the C++ names of all kernels of a file, each with all its dtypes."""
    codes_of = ("two_bits", "one_bit", "float16_code", "bfloat16_code")
    sums = sorted({(a, "float32" if a.endswith("float16") else a) for a in DTYPES} | {(a, a) for a in DTYPES})
    arguments = {
        "": [""],
        "class Kind": [f"<{dtype}_kind>" for dtype in FLOATS],
        "class Term": [f"<{dtype}_kind>" for dtype in DTYPES],
        "class Code": [f"<{code}>" for code in codes_of],
        "class From, class Sum": [f"<{a}_kind, {b}_kind>" for a, b in sums],
    }
    by_name = {
        "measure": [f"<{a}_kind, {b}_kind>" for a in FLOATS for b in FLOATS],
        "cast": [f"<{a}_kind, {b}_kind>" for a in DTYPES for b in DTYPES if a != b],
    }
    declared = r"^(?:template <(.*)> )?__global__ void (?:LAUNCH_BOUNDS\(.*\)\s)?(\w+)\("
    found = re.findall(declared, loading.source_of(name), re.MULTILINE)
    return [f"{kernel}{each}" for given, kernel in found for each in by_name.get(kernel, arguments.get(given, []))]


def texts(name: str) -> list[tuple[str, list[str]]]:
    """Return the text of a file, or one for each rule, and the C++ names of all kernels in it."""
    if name == "rules.cu":
        each = [
            (rule := rule_of(one), [f"update<{rule.name}, {{}}, {n}>" for n in ("one", "many")]) for one in made(RULES)
        ]
    elif name == "layerwise.cu":
        parts = [(part, rule_of(one, (part,))) for one in made(LAYERWISE) for part in layerwise.PARTS]
        each = [
            (rule, [layerwise.launch_of(part, rule, "float32")[0].replace("float32_kind", "{}")])
            for part, rule in parts
        ]
    else:
        return [(loading.source_of(name), expressions(name))]
    return [
        (loading.source_of(name, rule), list({text.format(f"{kind}_kind"): None for text in names for kind in FLOATS}))
        for rule, names in each
    ]


def made(rules: Any) -> list[Any]:
    return [optimizers.create(name, clip_gradient=1.0, **options) for name, options in map(plain, rules)]


@pytest.fixture(scope="module")
def nvrtc() -> Any:
    pytest.importorskip("cupy", reason="CuPy is not installed: it brings what speaks to NVRTC")
    from cupy_backends.cuda.libs import nvrtc

    try:
        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        pytest.skip(f"NVRTC is not installed: {error}")
    return nvrtc


@pytest.mark.deadline(300)
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", [*loading.HEADERS, "codes.cu", "rows.cu", "steps.cu"])
def test_machine_code(nvrtc: Any, name: str, architecture: str) -> None:
    """A thread has registers for all that it has at a time; what it has not, it would keep in memory of the GPU."""
    for text, names in texts(name):
        program = nvrtc.createProgram(text, "kernels.cu", (), ())
        for each in names:
            nvrtc.addNameExpression(program, each)
        options = (*loading.OPTIONS, f"-arch={architecture}", "--device-as-default-execution-space", "-Xptxas=-v")
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError:
            pytest.fail(nvrtc.getProgramLog(program))
        assert len({nvrtc.getLoweredName(program, each) for each in names}) == len(names) > 0
        told = nvrtc.getProgramLog(program)
        assert bytes(nvrtc.getCUBIN(program)[:4]) == b"\x7fELF"
        nvrtc.destroyProgram(program)
        kept = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", told)
        assert kept == [("0", "0", "0")] * len(names)
        assert "warning" not in told
