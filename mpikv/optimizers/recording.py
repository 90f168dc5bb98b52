"""Records an optimizer's rule as the operations on one element, in numpy's order. Compiled kernels are printed from it.

``prepare`` and ``rule`` run on arrays and numbers that have names only; what they ask of numpy is the record. So a rule
has one definition. Compiled code rounds numbers to the arrays' dtype before it uses them, as numpy does.

Where a rule asks about its options, the record holds for optimizers with the same answers. Where it asks about a number
of the step, it runs both ways, and the record has both.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from textwrap import indent
from typing import Any, TypeGuard

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ..errors import Unsupported
from .optimizer import Block, Optimizer, Step

OPERATIONS: dict[Any, str] = {np.add: "{} + {}", np.subtract: "{} - {}", np.multiply: "{} * {}", np.divide: "{} / {}"}
"""The operations that have the same bits in numpy, in numba's loops and on GPUs."""
OPERATIONS |= {np.negative: "-{}", np.square: "{0} * {0}", np.sqrt: "root({})", np.absolute: "magnitude_of({})"}
OPERATIONS |= {np.sign: "sign_of({})", np.maximum: "larger({}, {})", np.minimum: "smaller({}, {})"}
OPERATIONS |= {np.clip: "clipped({}, {}, {})"}

_QUESTIONS = 4
"""The most questions about a step on one way through a rule."""
_NAMES = {"inf": math.inf, "nan": math.nan, "magnitude_of": abs}
_PARTS = "prepare", "rule"
"""The methods that make an element-wise update."""


@dataclass(frozen=True, eq=False)
class Rule:
    """The record of a rule; equal records are one object."""

    name: str
    states: tuple[str, ...]
    code: str
    """C++ statements. They assign to ``weight``, ``gradient``, ``state0`` …, ``spare0`` … and ``new0`` …"""
    numbers: tuple[str, ...]
    """The numbers that the code takes from a call, as ``n[0]`` …; ``bits`` are the answers about the step."""


_rules: dict[str, Rule] = {}
_records: defaultdict[tuple[type[Optimizer], tuple[str, ...]], list[tuple[Rule, Any]]] = defaultdict(list)
"""For each class and its parts the rules, and functions that return the answers about a step, as bits, and the numbers
of a call. These return None for an optimizer whose options ask for another record.
"""


def is_recordable(updater: object) -> TypeGuard[Optimizer]:
    """Return whether an updater is an element-wise optimizer with the ``update`` and ``bind`` of Optimizer itself."""
    kind: Any = type(updater)
    own = isinstance(updater, Optimizer) and (kind.update, kind.bind) != (Optimizer.update, Optimizer.bind)
    return isinstance(updater, Optimizer) and updater.elementwise and not own


def rule_of(optimizer: Optimizer, parts: tuple[str, ...] = _PARTS) -> Rule:
    """Return the compilable record of the rule for the present options; record it if new. Unsupported if it cannot be
    recorded.
    """
    return call_of(optimizer, Step(1.0, 0.0, tuple(map(float, optimizer.correction(1)))), parts)[0]


def call_of(optimizer: Optimizer, step: Step, parts: tuple[str, ...] = _PARTS) -> tuple[Rule, tuple[float, ...]]:
    """Return the rule's record for the present options, made if new, and the arguments of its code for this step: bits,
    then numbers. Unsupported if it cannot be recorded.

    ``parts`` are the methods to record. ``adapt`` is recorded by itself: its rule takes two norms, as weight and
    gradient in float64, and puts the rate in the place of the weight.

    Raises:
        Unsupported: the rule cannot be recorded.
    """
    known = _records[type(optimizer), parts]
    for rule, call in known:
        found = call(optimizer, step)
        if found is not None:
            return rule, found
    known.insert(0, _record(optimizer, len(step.correction), parts))
    return call_of(optimizer, step, parts)


def _record(optimizer: Optimizer, corrections: int, parts: tuple[str, ...]) -> tuple[Rule, Any]:
    """Run methods on stand-ins; return their Rule, and a function (optimizer, step) that returns bits and numbers, or
    None for options that need another record. Unsupported if it fails.
    """
    recorder = _Recorder(optimizer, corrections, parts)
    run = recorder.follow_rate if parts == ("adapt",) else recorder.follow
    try:
        (code, _), (again, call) = run({}), run({})
        if code != again:
            raise _Refusal("it does something else when it runs again")
    except Exception as error:
        why = str(error) if isinstance(error, _Refusal) else f"{type(error).__name__}: {error}"
        raise Unsupported(
            f"the rule of {type(optimizer).__name__} cannot be compiled: {why}; write it with copyto, "
            f"{', '.join(each.__name__ for each in OPERATIONS)} of numpy on whole arrays of its block, compute numbers "
            "with operators or in correction(), or use a store on the host with kernels='numpy'"
        ) from error
    name = re.sub(r"\W", "_", f"{type(optimizer).__name__.lower()}_{parts[-1]}", flags=re.ASCII)
    text = "\n".join(code)
    used = 1 + max((int(place) for place in re.findall(r"\bstate(\d+)", text)), default=-1)
    rule = Rule(name, recorder.states[:used], text, tuple(recorder.numbers))
    # The text is of attributes, numbers and operators only.
    call = eval(f"lambda o, s: {call} if {' and '.join(recorder.guards)} else None", _NAMES)
    return _rules.setdefault(repr(rule), rule), call


class _Refusal(Exception):
    """Says what in a rule cannot be recorded."""


class _Question(BaseException):
    """A rule asks about the step. No ``except Exception`` of a rule may catch it."""


class _Recorder:
    """Runs parts of an optimizer along all of their ways."""

    def __init__(self, optimizer: Optimizer, corrections: int, parts: tuple[str, ...]) -> None:
        """Begin an empty record of these methods, for steps with so many ``corrections``; run nothing yet."""
        self._optimizer, self._corrections, self._parts = optimizer, corrections, parts
        self.guards = {f"len(s.correction) == {corrections}": None}
        self.numbers, self._bits, self._used = dict[str, int](), dict[str, int](), set[str]()

    def follow(self, answers: Mapping[str, bool], begin: int = 0) -> tuple[tuple[str, ...], str]:
        """Run the parts along all ways that ``answers`` leave open (at the start {}); return C++ statements from the
        ``begin``-th, and the call's bits and numbers as Python text.

        The text must not compute numbers of other ways: zeros stand for these.
        """
        self._lines, self._used = list[str](), set[str]()
        try:
            trial, step, block = self._make_stand_ins(answers)
            for part in self._parts:
                getattr(trial, part)(step, block)
        except _Question as asked:
            (question,) = asked.args
        else:
            bits = sum(answer << self._bits[each] for each, answer in answers.items())
            numbers = "".join(f"{each if each in self._used else 0.0}, " for each in self.numbers)
            return tuple(self._lines[begin:]), f"({bits}, {numbers})"
        lines, bit = tuple(self._lines), 1 << self._bits.setdefault(question, len(self._bits))
        (yes, first), (no, second) = (self.follow({**answers, question: each}, len(lines)) for each in (True, False))
        # Most ways meet again, as where only a weight decay is added.
        same = len([*takewhile(lambda ends: ends[0] == ends[1], zip(reversed(yes), reversed(no), strict=False))])
        parts = ((test, part[: len(part) - same]) for test, part in ((f"bits & {bit}", yes), (f"~bits & {bit}", no)))
        ways = (f"if ({test}) {{\n{indent(chr(10).join(part), '    ')}\n}}" for test, part in parts if part)
        return (*lines[begin:], *ways, *yes[len(yes) - same :]), f"({first} if {question} else {second})"

    def follow_rate(self, answers: Mapping[str, bool]) -> tuple[tuple[str, ...], str]:
        """Run ``adapt`` along all ways that ``answers`` leave open (at the start {}); return (C++ code,), and the
        call's numbers as Python text.
        """
        trial, step, _ = self._make_stand_ins(answers)
        try:
            code = f"weight = {trial.adapt(step, _Number(self, 'weight'), _Number(self, 'gradient')).text};"
        except _Question as asked:
            (question,) = asked.args
            yes, no = (self.follow_rate({**answers, question: each})[0][0] for each in (True, False))
            code = f"if ({question} != 0) {{\n{indent(yes, '    ')}\n}} else {{\n{indent(no, '    ')}\n}}"
        if "**" in code:
            raise _Refusal("adapt uses **, whose bits differ between Python and GPUs")
        numbers = r"float\(o\.\w+\)|\b[os]\.\w+(\[\d+\])?|\b(inf|nan)\b"
        code = re.sub(numbers, lambda found: self.operand(_Number(self, found[0])), code)
        return (code,), f"(0, {', '.join(self.numbers)})"

    def _make_stand_ins(self, answers: Mapping[str, bool]) -> tuple[Any, Step, Block]:
        """Return new stand-ins for optimizer, step and block that report to this object; _Refusal past 4 questions."""
        if len(answers) > _QUESTIONS:
            raise _Refusal(f"it asks more than {_QUESTIONS} questions about its step, the last about {[*answers][-1]}")
        self._answers, options = answers, vars(self._optimizer)

        def get(trial: Any, name: str) -> Any:
            """Return an attribute of the optimizer's stand-in; an option goes through :meth:`_option`, and its guard is
            recorded.
            """
            value = object.__getattribute__(trial, name)
            return self._option(name, value) if name in options or name == "__dict__" else value

        def refuse(trial: Any, name: str, value: Any) -> None:
            """Raise _Refusal: a recorded rule sets no attribute."""
            raise _Refusal(f"it sets {name}")

        kind: Any = type(self._optimizer)
        trial: Any = object.__new__(type(kind.__name__, (kind,), {"__getattribute__": get, "__setattr__": refuse}))
        object.__getattribute__(trial, "__dict__").update(options)
        self.states = trial.states
        array: Any = partial(_Array, self)  # in the places of numpy's arrays, and numbers in those of Python's
        number: Any = partial(_Number, self)
        states = [array(f"state{place}") for place in range(len(self.states))]
        spares = [array(f"spare{place}") for place in range(trial.spares)]
        self._written = {"weight", "gradient", *(each.text for each in states)}
        correction = tuple(number(f"s.correction[{place}]") for place in range(self._corrections))
        step = Step(number("s.rate"), number("s.wd"), correction)
        return trial, step, Block(array("gradient"), array("weight"), states, spares, None, False)

    def _option(self, name: str, value: Any) -> Any:
        """Return a number's stand-in, or a flag, text or tuple itself; record a guard; _Refusal for other types."""
        if type(value) in (int, float):
            self.guards[f"o.{name} is not None"] = None
            return _Number(self, f"o.{name}" if type(value) is float else f"float(o.{name})")
        if type(value) not in (bool, str, tuple, type(None)):
            raise _Refusal(f"it reads {name}, of type {type(value).__name__}")
        self.guards[f"o.{name} == {value!r}"] = None
        return value

    def answer(self, text: str) -> bool:
        """Return whether a number is true. One of the step has its answer on this way, or raises _Question. Another is
        computed from the options, and a guard recorded.
        """
        # The factor of the sum changes with batches and ranks: it counts as a number of the step.
        if re.search(r"\bs\.|\bo\.rescale\b|\bweight\b|\bgradient\b", text):
            if text not in self._answers:
                raise _Question(text)
            return self._answers[text]
        answer = bool(eval(text, _NAMES, {"o": self._optimizer}))
        self.guards[text if answer else f"not {text}"] = None
        return answer

    def operate(self, operation: Any, inputs: Any, out: Any = None, **options: Any) -> _Array:
        """Record an operation of numpy, or raise _Refusal; return the stand-in for its result."""
        arrays = [type(each) is _Array for each in inputs]
        if operation not in OPERATIONS or options or not any(arrays):
            raise _Refusal(f"it uses {operation.__name__}{''.join(f' with {name}=' for name in options)}")
        if operation is np.clip and any(arrays[1:]):
            raise _Refusal("it clips by arrays")  # numpy then treats zeros at a bound in another way
        return self.assign(out, OPERATIONS[operation].format(*map(self.operand, inputs)))

    def assign(self, target: Any, text: str) -> _Array:
        """Record that C++ text is written to ``target``, or for None to a new array; return its stand-in; _Refusal for
        an array from elsewhere.
        """
        target = _Array(self, f"new{len(self._lines)}") if target is None else target
        if not isinstance(target, _Array):
            raise _Refusal("it writes to an array that is not of its block")
        self._lines.append(f"{target.text} = {text};")
        self._written.add(target.text)
        return target

    def operand(self, operand: Any) -> str:
        """Return an operand as C++ text, and note a number as one of the call; _Refusal for an unwritten array."""
        if isinstance(operand, _Array):
            if operand.text not in self._written:
                raise _Refusal(f"it reads {operand.text} before it writes it")
            return operand.text
        if not isinstance(operand, _Number) and type(operand) not in (int, float):
            raise _Refusal(f"it computes with an operand of type {type(operand).__name__}")
        text = operand.text if isinstance(operand, _Number) else repr(float(operand))
        number = text.removeprefix("-")  # a number and its opposite are one number of the call
        self._used.add(number)
        place = self.numbers.setdefault(number, len(self.numbers))
        return f"n[{place}]" if number == text else f"(-n[{place}])"


class _Symbol:
    """An array or a number while a rule is recorded; numpy's functions report here."""

    def __init__(self, recorder: _Recorder, text: str) -> None:
        """Keep the recorder, and the C++ or Python text that stands for the array or number; record nothing."""
        self.recorder, self.text = recorder, text

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (None,), **options: Any) -> Any:
        """Record a ufunc of numpy that was called with this object; return the stand-in of its result; or _Refusal."""
        if method != "__call__":
            raise _Refusal(f"it uses {ufunc.__name__}.{method}")
        return self.recorder.operate(ufunc, inputs, out[0], **options)

    def __array_function__(self, function: Any, types: Any, arguments: Any, options: Any) -> Any:
        """Record copyto or clip that was called with this object; return the stand-in of its result; or _Refusal."""
        if function is np.copyto and len(arguments) == 2 and not options:
            return self.recorder.assign(arguments[0], self.recorder.operand(arguments[1]))
        return self.recorder.operate(function, arguments, **options)


class _Array(_Symbol, NDArrayOperatorsMixin):
    """An array of a block."""

    def __pow__(self, exponent: Any) -> Any:
        """Record a square, and return its stand-in; _Refusal for another exponent."""
        operation, *more = (np.square,) if exponent == 2 else (np.power, exponent)
        return self.recorder.operate(operation, (self, *more))

    def __getitem__(self, place: Any) -> Any:
        """Return this stand-in itself for the whole array; _Refusal for a part."""
        if isinstance(place, _Array) or place not in (..., slice(None)):
            raise _Refusal(f"it takes a part of {self.text}")
        return self

    def __setitem__(self, place: Any, value: Any) -> None:
        """Record a copy of a value to the whole array; _Refusal for a part."""
        self.recorder.assign(self[place], self.recorder.operand(value))

    def __bool__(self) -> bool:
        """Raise _Refusal: a kernel cannot branch by elements."""
        raise _Refusal(f"it asks about elements of {self.text}")


class _Number(_Symbol):
    """A number of the optimizer, of the step, or computed of those."""

    def __bool__(self) -> bool:
        """Return the recorder's answer to whether the number is true; it may raise _Question."""
        return self.recorder.answer(self.text)

    def __neg__(self) -> Any:
        """Return the stand-in of the opposite number."""
        return _Number(self.recorder, f"-{self.text}")

    def __abs__(self) -> Any:
        """Return the stand-in of the number's magnitude."""
        return _Number(self.recorder, f"magnitude_of({self.text})")

    def compute(self, symbol: str, other: Any, turned: bool = False) -> Any:
        """Return a stand-in for ``self symbol other``, if ``turned`` reversed; NotImplemented for a non-number."""
        if type(other) not in (int, float, _Number):
            return NotImplemented
        left, right = self.text, other.text if isinstance(other, _Number) else repr(float(other))
        text = f"(({right}) {symbol} ({left}))" if turned else f"(({left}) {symbol} ({right}))"
        return _Number(self.recorder, text)


_OPERATORS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**"}
_OPERATORS |= {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
for _name, _symbol in _OPERATORS.items():
    setattr(_Number, f"__{_name}__", lambda own, other, symbol=_symbol: own.compute(symbol, other))
    setattr(_Number, f"__r{_name}__", lambda own, other, symbol=_symbol: own.compute(symbol, other, True))
