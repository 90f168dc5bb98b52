"""Compiles the kernels of this package, and loads each once per process. The first one imports CuPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any, TypeAlias

import numpy as np

from ...arrays.arrays import accumulator
from ...errors import TransportError, TransportUnavailable, ValueMismatch
from ...optimizers.optimizer import Optimizer
from ...optimizers.recording import Rule
from ...protocols import Array, Whole
from .images import compiled_image

Kernel: TypeAlias = Callable[[tuple[int], tuple[int], tuple[Any]], None]
"""``kernel(grid, block, (arguments,))`` queues a launch on the current stream. The argument is a numpy array of one
element; the launch copies its bytes before it returns."""

OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
"""Round every operation by itself, as IEEE 754 says, so that kernels give numpy's bits: no fused multiply-add."""

# The types of fields in arguments, and a field's type, asterisk, name and length. An asterisk makes it an address.
_KINDS = {"int": np.int32, "long long": np.int64, "double": np.float64, "unsigned char": np.uint8}
_FIELD = re.compile(r"^    (?:const )?(.+?)(\*?) (\w+)(?:\[(.+)\])?;", re.MULTILINE)

HEADERS = {
    "copies.cu": ("pairs.h",),
    "norms.cu": ("pairs.h", "pairwise.h"),
    "layerwise.cu": ("pairwise.h", "elements.h"),
    "rules.cu": ("elements.h",),
}
"""Headers put before a source, besides ``numbers.h``."""


def source_of(name: str, rule: Rule | None = None) -> str:
    """Return the text to compile for a source file of this package: headers, the rule that it runs, and the source."""
    folder = Path(__file__).parent
    *headers, own = ((folder / part).read_text() for part in ("numbers.h", *HEADERS.get(name, ()), name))
    return "".join((*headers, print_rule(rule) if rule else "", own))


@cache
def argument_dtype(name: str, struct: str, **sizes: int) -> np.dtype[Any]:
    """Return the dtype of a launch's argument, read from its C++ struct in a source of this package. Local.

    ``sizes`` gives the constants in lengths of arrays that no enum has there. Every GPU takes at least 4096 bytes, and
    some no more.
    """
    text = source_of(name)
    constants = "".join(re.findall(r"^enum {(.*)};", text, re.MULTILINE))
    known = {word: int(number) for word, number in re.findall(r"(\w+) = (\d+)", constants)} | sizes
    (body,) = re.findall(rf"struct {struct} {{(.*?)^}};", text, re.DOTALL | re.MULTILINE)
    fields: list[tuple[str, type[Any], tuple[int, ...]]] = []
    for kind, pointer, field, length in _FIELD.findall(body):
        shape = tuple(known[each.rpartition("::")[2]] for each in length.split(" * ") if each)
        fields.append((field, np.uintp if pointer else _KINDS[kind], shape))
    return np.dtype(fields, align=True)


def print_rule(rule: Rule) -> str:
    """Return the C++ text of a type for a rule. The type's ``directs`` says if its code changes the gradient. Local."""
    words = set(re.findall("[a-z]+", rule.code))
    kinds = {"weight": "T&", "gradient": "T&", "state": "T*", "bits": "int", "n": "const T*"}
    parameters = ", ".join(kind + f" {name}" * (name in words) for name, kind in kinds.items())
    lines = [f"T& state{place} = state[{place}];" for place in range(len(rule.states))]
    lines += [f"T {name} = 0;" for name in sorted(set(re.findall(r"(?:spare|new)\d+", rule.code)))]
    return f"""\
template <class T> struct {rule.name} {{
    enum {{ states = {len(rule.states)}, directs = {int("gradient =" in rule.code)} }};
    static INNER void update({parameters}) {{
{indent(chr(10).join((*lines, rule.code)), "        ")}
    }}
}};
"""


def kernel(name: str, expression: str, rule: Rule | None = None) -> Kernel:
    """Return a kernel of a source by its C++ name, loaded on the current GPU if new; or TransportUnavailable. Local.

    A name is such as ``cast<int32_kind, float32_kind>``. ``rule``: as for :func:`source_of`.

    Raises:
        TransportUnavailable: CuPy, its compiler or a GPU is missing.
    """
    try:
        import cupy

        return load_kernel(name, expression, rule, cupy.cuda.runtime.getDevice())
    except Exception as error:
        # NVRTC may be missing, of another version, or too new for the GPU: CuPy has an exception class for each.
        raise TransportUnavailable(
            f"the CUDA kernel {expression} could not be loaded ({type(error).__name__}: {error}); "
            "it needs a GPU, CuPy and NVRTC: pip install 'cupy-cuda13x[ctk]' (cupy-cuda12x with an older driver)"
        ) from error


@cache
def load_kernel(name: str, expression: str, rule: Rule | None, ordinal: int) -> Kernel:
    """Return a kernel of the current GPU, whose number is ``ordinal``; compile or load it once per process. Local."""
    import cupy

    code, inner = compiled_image(cupy, source_of(name, rule), OPTIONS, expression)
    module = cupy.cuda.function.Module()
    module.load(code)
    # A function keeps its module.
    return _by_address(expression, module.get_function(inner), cupy.cuda.function.CPointer)


def _by_address(expression: str, function: Callable[..., None], parameter_at: Callable[[int], Any]) -> Kernel:
    """Return a kernel that launches a CuPy function by its argument's address; TransportError if a launch failed.

    Given an array, CuPy would make numpy list its fields: 6 to 12 us per launch, against 1.5 us. It raises
    TransportError if this launch or an earlier one failed.
    """

    def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any]) -> None:
        """Queue a launch on the current stream; TransportError if this one or an earlier one failed."""
        (given,) = arguments  # it must live until the launch has copied it
        try:
            function(grid, block, (parameter_at(given.ctypes.data),))
        except RuntimeError as error:  # of the driver or of the runtime
            raise TransportError(f"the CUDA kernel {expression} could not be launched: {error}") from error

    return launch


def allocate_floats(count: int) -> Array:
    """Return undefined memory of the current GPU for ``count`` float64. Local.

    It belongs to the current stream, and goes back to this stream's pool.
    """
    import cupy

    memory: Array = cupy.empty(count, "float64")
    return memory


def address_of(name: str, array: Array, dtype: np.dtype[Any], size: int) -> int:
    """Return an array's address; ValueMismatch if it has gaps, or another dtype or size than this. Local.

    A kernel would write beyond a smaller array.

    Raises:
        ValueMismatch: it has gaps, or another dtype or size.
    """
    if array.dtype != dtype or array.size != size or not array.flags.c_contiguous:
        raise ValueMismatch(
            f"{name} of an update is {array.size} elements of {array.dtype.name}, strides {array.strides}; it must be "
            f"contiguous, {size} elements of {dtype.name}"
        )
    return gpu_pointer(array)


def gpu_pointer(array: Array) -> int:
    """Return the GPU address of a CuPy array's first byte, as an int; a numpy array has none. Local."""
    # Array is typed as numpy's, which lacks data.ptr.
    return int(array.data.ptr)  # type: ignore[attr-defined]


def addresses_of(optimizer: Optimizer, whole: Whole, states: int) -> dict[str, Any]:
    """Return the addresses of sum, value, master (or 0) and ``states`` state arrays, by names in a launch's argument;
    ValueMismatch for an array that does not fit. Local.
    """
    (total, value, state), size = whole, whole.value.size
    kept = {name: address_of(name, state[name], dtype, size) for name, dtype in optimizer.slots(value.dtype).items()}
    master, found = kept.pop("master", 0), list(kept.values())
    return {
        "total": address_of("the sum", total, accumulator(value.dtype), size),
        "value": address_of("the value", value, value.dtype, size),
        "master": master,
        "state": (found + [0] * states)[:states],  # a rule may use the first ones alone
    }
