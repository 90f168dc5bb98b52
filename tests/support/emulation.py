"""A stand-in for CuPy that runs kernels on the host: their sources are compiled as plain C++, and a launch runs its
threads one after the other. Its arrays are numpy's.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import zlib
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from mpikv import optimizers
from mpikv.compute.cuda import kernels, layerwise, loading
from mpikv.optimizers.recording import rule_of

from .rules import LAYERWISE, RULES, plain

__all__ = [
    "RULED",
    "Launch",
    "OnDevice",
    "compiler",
    "cupy_on_host",
    "doors",
    "emulated",
    "expressions",
    "launched",
    "on_demand",
    "own_text",
    "run_program",
    "texts",
]

FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *(*FLOATS, "complex64", "complex128"),
)
RULED = "rules.cu", "layerwise.cu"
"""Files whose kernels run a rule, which stands before them."""
STRUCTS = {
    "codes.cu": "Codes",
    "copies.cu": "Pairs",
    "layerwise.cu": "Layers",
    "norms.cu": "Arrays",
    "rows.cu": "Rows",
    "steps.cu": "Numbers",
}
CODES = ("two_bits", "one_bit", "float16_code", "bfloat16_code")
# As on a GPU: every operation is rounded by itself. Warnings are errors, but for pragmas of the other compiler.
# Unique symbols would give the block memory of one library to all later ones of the process.
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fno-gnu-unique", "-Wall", "-Wextra", "-Werror")
FLAGS += ("-Wno-unknown-pragmas",)

LAUNCH = """
#ifndef BEGIN
#define BEGIN
#endif
template <class Given> static void launch(void (*kernel)(Given), unsigned int first, unsigned int blocks,
                                          unsigned int threads, const void* given) {
    BEGIN
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = first; blockIdx.x < blocks; blockIdx.x++)
        for (unsigned int thread = 0; thread < threads; thread++) {
            threadIdx.x = thread;
            phase = 0;
            kernel(*(const Given*)given);
        }
}
"""


def expressions(name):
    """Return the C++ names of all kernels of a file, each with all its dtypes."""
    text = loading.source(name)
    found = []
    for parameters, kernel in re.findall(
        r"^(?:template <(.*)> )?__global__ void (?:LAUNCH_BOUNDS\(.*\)\s)?(\w+)\(", text, re.MULTILINE
    ):
        if not parameters:
            found.append(kernel)
        elif kernel == "measure":
            found += [f"{kernel}<{a}_kind, {b}_kind>" for a in FLOATS for b in FLOATS]
        elif parameters == "class Kind":
            found += [f"{kernel}<{dtype}_kind>" for dtype in FLOATS]
        elif parameters == "class Code":
            found += [f"{kernel}<{code}>" for code in CODES]
        elif kernel == "cast":
            found += [f"{kernel}<{a}_kind, {b}_kind>" for a in DTYPES for b in DTYPES if a != b]
        elif parameters == "class From, class Sum":
            sums = {(a, "float32" if a.endswith("float16") else a) for a in DTYPES} | {(a, a) for a in DTYPES}
            found += [f"{kernel}<{a}_kind, {b}_kind>" for a, b in sorted(sums)]
        else:
            assert parameters == "class Term"
            found += [f"{kernel}<{dtype}_kind>" for dtype in DTYPES]
    return found


def siblings(expression):
    """Return the C++ names of a rule's kernel for all dtypes and numbers of ranges."""
    names = [re.sub(r"\w+_kind", f"{each}_kind", expression) for each in FLOATS]
    return tuple(dict.fromkeys(re.sub("(one|many)>", count, each) for each in names for count in ("one>", "many>")))


def texts(name):
    """Return the text of a file, or one for each rule, and the C++ names of all kernels in it."""
    if name not in RULED:
        return [(loading.source(name), expressions(name))]
    if name == "rules.cu":
        found = [(f"update<{rule.name}, float32_kind, one>", rule) for rule in map(rule_of, made(RULES))]
    else:
        parts = [(part, rule_of(each, (part,))) for each in made(LAYERWISE) for part in layerwise.PARTS]
        found = [layerwise.launch_of(part, rule, "float32") for part, rule in parts]
    return [(loading.source(name, rule), siblings(expression)) for expression, rule in found]


def made(rules):
    return [optimizers.create(name, clip_gradient=1.0, **options) for name, options in map(plain, rules)]


def compiler():
    """Return a C++ compiler of this machine, or skip."""
    found = shutil.which("g++")
    if found is None:
        pytest.skip("g++ is not installed: it compiles the CUDA sources for the host")
    return found


def doors(names):
    """Return the text by which the launches of kernels are found: of blocks from the first of a grid on."""
    return "".join(
        f'extern "C" void launch_{i}(unsigned int first, unsigned int blocks, unsigned int threads, const void* given) '
        f"{{ launch({each}, first, blocks, threads, given); }}\n"
        for i, each in enumerate(names)
    )


def emulated(name, folder):
    """Return a dict of the kernels of a file, which run on the host; of one in RULED a function: :func:`on_demand`."""

    def build(text, names):
        path = folder / f"{name}-{zlib.crc32(text.encode()):08x}.cpp"
        path.write_text(text + LAUNCH + doors(names))
        subprocess.run([compiler(), *FLAGS, "-shared", "-fPIC", "-o", path.with_suffix(".so"), path], check=True)
        loaded = ctypes.CDLL(str(path.with_suffix(".so")))
        return {each: partial(getattr(loaded, f"launch_{i}"), ctypes.c_uint(0)) for i, each in enumerate(names)}

    return on_demand(build) if name in RULED else build(loading.source(name), expressions(name))


def on_demand(build):
    """Return a function that returns a kernel of a rule by its text and C++ name. ``build(text, names)`` compiles."""
    build = cache(build)

    def find(text, expression):
        return build(text, siblings(expression))[expression]

    return find


def run_program(name, lines, folder):
    """Return what C++ statements print that know a source."""
    path, program = folder / f"print-{name}.cpp", folder / f"print-{name}"
    body = "\n".join(lines)
    text = texts(name)[0][0]
    path.write_text(f"#include <cstddef>\n#include <cstdio>\n{text}\nint main() {{\n{body}\n}}\n")
    subprocess.run([compiler(), "-std=c++17", "-Wno-invalid-offsetof", "-o", program, path], check=True)
    return subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()


@contextmanager
def launched(name, folder):
    """Have the kernels of a source run on the host meanwhile; yield the list of launches."""
    compiler()
    launches = []
    with pytest.MonkeyPatch.context() as patch:
        loading.loaded.cache_clear()
        # Hypothesis looks at all modules, and at the first look this one of CuPy's imports what no stand-in has.
        patch.delitem(sys.modules, "cupyx", raising=False)
        patch.setitem(sys.modules, "cupy", cupy_on_host({name: emulated(name, folder)}, launches))
        yield launches
    loading.loaded.cache_clear()


def structure(name, expression):
    """Return what a kernel of a file takes."""
    if name == "rules.cu":
        room = kernels.MANY if expression.endswith("many>") else kernels.ONE
        return loading.argument(name, "Update", ranges=room.ranges, rows=room.rows)
    return loading.argument(name, STRUCTS[name])


def own_text(name):
    return (Path(loading.__file__).parent / name).read_text()


HEADER = own_text("numbers.h")


class OnDevice(np.ndarray):
    """A numpy array that tells where it lies as CuPy's do."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


class Launch:
    """What one launch was given."""

    def __init__(self, expression, grid, block, arguments):
        self.expression, self.grid, self.block = expression, grid, block
        self.arguments = arguments.copy()


def cupy_on_host(programs, launches):
    """Return a module with what of CuPy loads kernels, which finds them by their sources. Each launch is noted, and run
    where there is a kernel.
    """

    def compile_using_nvrtc(code, options, *, name_expressions, cache_in_memory):
        assert options == ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
        assert cache_in_memory
        (name,) = [name for name in programs if code.startswith(HEADER) and code.endswith(own_text(name))]
        (expression,) = name_expressions
        assert name in RULED or expression in expressions(name)
        return (name, expression, code), {expression: f"lowered {expression}"}

    class Module:
        def load(self, image):
            self._name, self._expression, self._code = image

        def get_function(self, lowered):
            assert lowered == f"lowered {self._expression}"
            expression, program = self._expression, programs[self._name]
            run = program(self._code, expression) if callable(program) else program.get(expression)
            dtype = structure(self._name, expression)
            assert dtype.itemsize <= 4096

            def start(grid, block, arguments):
                (pointer,) = arguments
                given = np.frombuffer((ctypes.c_char * dtype.itemsize).from_address(pointer.ptr), dtype)
                ((blocks,), (threads,)) = grid, block
                assert 0 < blocks < 1 << 31
                launches.append(Launch(expression, grid, block, given))
                if run is not None:
                    run(ctypes.c_uint(blocks), ctypes.c_uint(threads), ctypes.c_void_p(pointer.ptr))

            return start

    cuda = SimpleNamespace(
        compiler=SimpleNamespace(compile_using_nvrtc=compile_using_nvrtc),
        function=SimpleNamespace(Module=Module, CPointer=lambda address: SimpleNamespace(ptr=address)),
        runtime=SimpleNamespace(getDevice=lambda: 0),
    )
    return SimpleNamespace(
        cuda=cuda,
        empty=lambda count, dtype: np.full(count, np.nan, dtype).view(OnDevice),
        zeros=lambda count, dtype: np.zeros(count, dtype).view(OnDevice),
    )
