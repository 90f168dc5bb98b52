"""Translates PTX to C and compiles it: ``python ptx.py FILE.ptx FILE.so LIBRARY``, as the emulated driver does.

A thread is a function of its registers. Where it waits for others it returns, and goes on there when it is called
again. So one thread of the host runs a whole grid, block after block, and no barrier is needed.
"""

import fcntl
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
# As on a GPU: every operation is rounded by itself, integers wrap, and memory has no types.
# -Og: most kernels run briefly, and compile in half the time of -O1.
FLAGS = ("-Og", "-w", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing", "-shared", "-fPIC")
REGISTERS = {"pred": "int", "b16": "u16", "b32": "u32", "b64": "u64", "f32": "f32", "f64": "f64"}
ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}
UNORDERED = {"equ": "ne", "neu": "==", "ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "rem": "%", "and": "&", "or": "|", "xor": "^"}
ROUNDED = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
FUNCTIONS = {"sqrt": "sqrt", "rsqrt": "1 / sqrt", "rcp": "1 / ", "ex2": "exp2", "lg2": "log2", "sin": "sin"}
FUNCTIONS |= {"cos": "cos", "tanh": "tanh"}
ATOMICS = {"add": "{0} + {1}", "exch": "{1}", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}"}
ATOMICS |= {"min": "{1} < {0} ? {1} : {0}", "max": "{1} > {0} ? {1} : {0}", "cas": "{0} == {1} ? {2} : {0}"}
SPACES = "param", "global", "shared", "local", "const"


class NotTranslated(Exception):
    """An instruction that this module does not know."""


class Symbol(NamedTuple):
    """Where a named variable lies: its space, and its offset there or its name in C."""

    space: str
    place: object


def width(kind: str) -> int:
    """Return the bytes of a type."""
    return int(re.sub(r"\D", "", kind)) // 8


def split(text: str) -> list[str]:
    """Return the operands of an instruction; those in braces or brackets are one."""
    return [each.strip() for each in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)]


def c_name(name: str) -> str:
    return name.replace("$", "S_").replace("%", "")


def aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


class Entry:
    """One kernel, as a function of C."""

    def __init__(self, name: str, parameters: str, body: str, symbols: dict[str, Symbol], shared: int) -> None:
        self.name, self.symbols, self.shared = name, dict(symbols), shared
        self.registers: dict[str, str] = {}
        self.tables: dict[str, list[str]] = {}
        self.stops, self.local = 0, 0
        self.parameters: list[tuple[int, int]] = []
        self.size = 0
        for each in split(parameters):
            self._parameter(each)
        # Labels end with a colon, all else with a semicolon. Braces of blocks begin lines or follow the last semicolon.
        body = re.sub(r'(?m)\.pragma\s+"[^"]*";|^\s*\{|(?:^|(?<=;))\s*\}\s*$', "", body)
        lines = re.sub(r"(?m)^\s*([$\w]+:)\s*$", r"\1;", body).split(";")
        self.lines = [c for line in lines if (text := " ".join(line.split())) for c in self._line(text)]

    def _parameter(self, text: str) -> None:
        pointer = r"(?:\.ptr\s+)?(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?"
        found = re.fullmatch(rf"\.param\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+{pointer}([\w$]+)(?:\[(\d+)\])?", text)
        if found is None:
            raise NotTranslated(text)
        alignment, kind, name, count = found.groups()
        size = width(kind) * int(count or 1)
        offset = aligned(self.size, int(alignment or width(kind)))
        self.parameters.append((offset, size))
        self.symbols[name] = Symbol("param", offset)
        self.size = offset + size

    def _line(self, text: str) -> Iterator[str]:
        if found := re.fullmatch(r"\.reg \.(\w+) (.*)", text):
            for name, count in re.findall(r"(%\w+)(?:<(\d+)>)?", found[2]):
                kind = REGISTERS.get(found[1]) or REGISTERS["b" + found[1][1:]]
                names = [f"{name}{number}" for number in range(int(count))] if count else [name]
                self.registers |= dict.fromkeys(names, kind)
        elif found := re.fullmatch(r"\.local \.align (\d+) \.b8 ([\w$]+)\[(\d+)\]", text):
            self.symbols[found[2]] = Symbol("local", aligned(self.local, 16))
            self.local = aligned(self.local, 16) + int(found[3])
        elif found := re.match(r"\.(?:extern \.)?shared ", text):
            self.shared = declare_shared(text, self.symbols, self.shared)
        elif found := re.fullmatch(r"([$\w]+): \.branchtargets (.*)", text):
            self.tables[found[1]] = split(found[2])
        elif text.endswith(":"):
            yield f"{c_name(text[:-1])}:;"
        elif not text.startswith((".loc", ".pragma")):
            found = re.fullmatch(r"(?:@(!?)(%\w+) )?([\w.:]+) ?(.*)", text)
            if found is None:
                raise NotTranslated(text)
            no, guard, name, operands = found.groups()
            try:
                done = self._instruction(name.replace("::", "_").split("."), split(operands))
            except (KeyError, IndexError, StopIteration, ValueError):
                raise NotTranslated(text) from None
            yield f"if ({no}{self.read(guard, 'pred')}) {{ {done} }}" if guard else done

    # --- Operands

    def read(self, operand: str, kind: str) -> str:
        """Return an operand's value in C, as a type of PTX."""
        if operand.startswith("!"):
            return f"!{self.read(operand[1:], kind)}"
        if found := re.fullmatch(r"%(tid|ntid|ctaid|nctaid)\.([xyz])", operand):
            return f"(({kind})here->{found[1]}[{'xyz'.index(found[2])}])"
        if operand in ("%clock64", "%clock", "%globaltimer"):
            return f"(({kind})ticked())"
        if operand == "%laneid":
            return "(here->tid[0] & 31)"
        if operand == "WARP_SZ":
            return "32"
        if operand in self.registers:
            return self._as(f"r->{c_name(operand)}", self.registers[operand], kind)
        if found := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", operand):
            return self._as(f"0x{found[1]}ull", "u32" if len(found[1]) == 8 else "u64", kind)
        if re.fullmatch(r"-?\d+U?|0x[0-9A-Fa-f]+U?", operand):
            return operand if kind == "pred" else f"(({kind}){operand.rstrip('U')}{'ull' if '0x' in operand else 'll'})"
        return f"(({kind}){self.address(operand)})"

    @staticmethod
    def _as(text: str, stored: str, kind: str) -> str:
        if kind in ("pred", stored):
            return f"({text})"
        if stored in ("f32", "f64"):
            text, stored = f"bits_{stored}({text})", "u"
        return f"{kind}_bits({text})" if kind in ("f32", "f64", "f16", "bf16") else f"(({kind}){text})"

    def address(self, name: str) -> str:
        space, place = self.symbols[name]
        where = {"param": "(u64)here->given", "local": "(u64)r->local", "shared": "0ull", "global": "(u64)"}[space]
        return f"({where}{place})" if space == "global" else f"({where} + {place})"

    def write(self, target: str, kind: str, value: str) -> str:
        """Return the statement that puts a value of a type into a register."""
        if target == "_":
            return f"(void)({value});"
        if "|" in target:
            first, second = target.split("|")
            return self.write(first, kind, value) + self.write(second, kind, f"!r->{c_name(first)}")
        stored = self.registers[target]
        if kind in ("f16", "bf16") or (kind in ("f32", "f64") and kind != stored):
            value = f"bits_{kind}({value})"
        elif stored in ("f32", "f64") and kind != stored:
            value = f"{stored}_bits({value})"
        elif kind[0] == "s" and kind != "pred":
            value = f"({stored})(s{stored[1:]})({kind})({value})"
        elif kind[0] in "bu":
            value = f"({kind})({value})"
        return f"r->{c_name(target)} = {value};"

    # --- Instructions

    def _instruction(self, parts: list[str], a: list[str]) -> str:
        name, kind = parts[0], parts[-1]
        how = getattr(self, f"_{name}", None)
        if how is not None:
            return str(how(parts, a))
        real = kind in ("f32", "f64", "f16")
        given = [self.read(each, kind) for each in a[1:]]
        if "ftz" in parts and kind == "f32":
            given = [f"flushed({each})" for each in given]
        value = self._value(name, parts, kind, given, real, a)
        if name in ("div", "sqrt") and {"approx", "full"} & set(parts) and kind == "f32":
            value = f"nearly({value})"
        if "sat" in parts and real:
            value = f"fmin{'f' * (kind == 'f32')}(fmax{'f' * (kind == 'f32')}({value}, 0), 1)"
        return self.write(a[0], kind, f"flushed({value})" if "ftz" in parts and kind == "f32" else value)

    def _value(self, name: str, parts: list[str], kind: str, x: list[str], real: bool, a: list[str]) -> str:
        f = "f" if kind == "f32" else ""
        if name in SIGNS:
            return f"({kind})({x[0]} {SIGNS[name]} {x[1]})" if kind != "pred" else f"{x[0]} {SIGNS[name]} {x[1]}"
        if name == "fma":
            return f"fma{f}({x[0]}, {x[1]}, {x[2]})"
        if name in ("min", "max"):
            return f"f{name}{f}({x[0]}, {x[1]})" if real else f"{x[0]} {'<>'[name == 'max']} {x[1]} ? {x[0]} : {x[1]}"
        if name == "neg":
            return f"-{x[0]}"
        if name == "abs":
            return f"fabs{f}({x[0]})" if real else f"({x[0]} < 0 ? -{x[0]} : {x[0]})"
        if name == "not":
            return f"!{x[0]}" if kind == "pred" else f"~{x[0]}"
        if name == "copysign":
            return f"copysign{f}({x[1]}, {x[0]})"
        if name in FUNCTIONS:
            return f"({kind})({FUNCTIONS[name]}({x[0]}))"
        if name == "selp":
            return f"{self.read(a[3], 'pred')} ? {x[0]} : {x[1]}"
        if name in ("shl", "shr"):
            bits, by = 8 * width(kind), self.read(a[2], "u32")
            rest = f"({x[0]} < 0 ? -1 : 0)" if name == "shr" and kind[0] == "s" else "0"
            return f"{by} >= {bits} ? {rest} : ({kind})({x[0]} {'<<' if name == 'shl' else '>>'} {by})"
        if name == "bfi":
            first, count = self.read(a[3], "u32"), self.read(a[4], "u32")
            mask = f"(({kind})field(~0ull, 0, {count}) << {first})"
            return f"({x[1]} & ~{mask}) | ({x[0]} << {first} & {mask})"
        if name == "bfe" and kind[0] == "u":
            return f"({kind})field({x[0]}, {self.read(a[2], 'u32')}, {self.read(a[3], 'u32')})"
        if name == "prmt":
            return f"permuted({x[0]}, {x[1]}, {x[2]})"
        if name == "lop3":
            terms = [
                "(" + " & ".join("~" * (not number >> 2 - place & 1) + x[place] for place in range(3)) + ")"
                for number in range(8)
                if int(a[4], 0) >> number & 1
            ]
            return " | ".join(terms) or "0"
        if name == "shf":
            by = f"({x[2]} & 31)" if "wrap" in parts else f"({x[2]} > 32 ? 32 : {x[2]})"
            both = f"((u64){x[1]} << 32 | {x[0]})"
            return f"(u32)({both} << {by} >> 32)" if "l" in parts else f"(u32)({both} >> {by})"
        raise KeyError(name)

    def _mul(self, parts: list[str], a: list[str]) -> str:
        kind, more = parts[-1], f" + {self.read(a[3], parts[-1])}" if parts[0] == "mad" else ""
        if kind[0] == "f":
            ftz = "flushed" if "ftz" in parts else ""
            return self.write(a[0], kind, f"{ftz}({self.read(a[1], kind)} * {self.read(a[2], kind)})")
        bits = 8 * width(kind)
        wide = f"{kind[0]}{2 * bits}" if bits < 64 else "__int128" if kind[0] == "s" else "unsigned __int128"
        product = f"({wide}){self.read(a[1], kind)} * ({wide}){self.read(a[2], kind)}"
        if "wide" in parts:
            return self.write(a[0], wide, product + (f" + {self.read(a[3], wide)}" if more else ""))
        return self.write(a[0], kind, f"({kind})(({product}){f' >> {bits}' if 'hi' in parts else ''}){more}")

    _mad = _mul

    def _popc(self, parts: list[str], a: list[str]) -> str:
        bits = 8 * width(parts[-1])
        value = self.read(a[1], f"u{bits}")
        counted = {
            "popc": f"__builtin_popcountll({value})",
            "clz": f"({value} ? __builtin_clzll({value}) - {64 - bits} : {bits})",
            "brev": "",
        }[parts[0]]
        return self.write(a[0], "u32", counted)

    _clz = _popc

    def _mov(self, parts: list[str], a: list[str]) -> str:
        kind = parts[-1]
        if kind == "pred":
            return self.write(a[0], kind, self.read(a[1], kind))
        bits = 8 * width(kind)
        if a[0].startswith("{"):
            apart = split(a[0][1:-1])
            each = bits // len(apart)
            found = (self.write(to, f"b{each}", f"whole >> {place * each}") for place, to in enumerate(apart))
            return f"{{ u64 whole = {self.read(a[1], f'b{bits}')}; {' '.join(found)} }}"
        if a[1].startswith("{"):
            apart = split(a[1][1:-1])
            each = bits // len(apart)
            words = (f"(u64){self.read(part, f'b{each}')} << {place * each}" for place, part in enumerate(apart))
            return self.write(a[0], f"b{bits}", " | ".join(words))
        return self.write(a[0], kind, self.read(a[1], kind))

    def _cvta(self, parts: list[str], a: list[str]) -> str:
        value = self.read(a[1], "u64")
        if "shared" in parts:
            value = f"({value} - (u64)here->shared)" if "to" in parts else f"({value} + (u64)here->shared)"
        return self.write(a[0], "u64", value)

    def _ret(self, parts: list[str], a: list[str]) -> str:
        return "return -1;"

    _exit = _ret

    def _trap(self, parts: list[str], a: list[str]) -> str:
        return 'wrong(here, "trap", 0, 0);'

    def _bra(self, parts: list[str], a: list[str]) -> str:
        return f"goto {c_name(a[0])};"

    def _brx(self, parts: list[str], a: list[str]) -> str:
        cases = " ".join(f"case {number}: goto {c_name(name)};" for number, name in enumerate(self.tables[a[1]]))
        return f"switch ({self.read(a[0], 'u32')}) {{ {cases} }}"

    def _bar(self, parts: list[str], a: list[str]) -> str:
        self.stops += 1
        return f"return {self.stops}; case {self.stops}:;"

    _barrier = _bar

    def _membar(self, parts: list[str], a: list[str]) -> str:
        return ";"  # one thread runs at a time

    _fence = _membar

    def _setp(self, parts: list[str], a: list[str]) -> str:
        how, kind = parts[1], parts[-1]
        x, y = self.read(a[1], kind), self.read(a[2], kind)
        if "ftz" in parts:
            x, y = f"flushed({x})", f"flushed({y})"
        if how in ("nan", "num"):
            test = f"{'!' if how == 'num' else ''}({x} != {x} || {y} != {y})"
        elif how in UNORDERED:
            test = f"!({x} {UNORDERED[how]} {y})" if how != "equ" else f"!({x} < {y} || {x} > {y})"
        elif how == "ne":
            test = f"({x} < {y} || {x} > {y})" if kind[0] == "f" else f"({x} != {y})"
        else:
            test = f"({x} {ORDERED[how]} {y})"
        if len(a) == 4:
            test = f"({test} {SIGNS[parts[2]]} ({self.read(a[3], 'pred')}))"
        return self.write(a[0], "pred", test)

    def _cvt(self, parts: list[str], a: list[str]) -> str:
        *how, to, from_ = parts[1:]
        value = self.read(a[1], from_)
        if set(how) - {"rn", "rz", "ftz", "sat", *ROUNDED} or ("rz" in how and "f" in to):
            raise KeyError(how)
        if "ftz" in how and from_ == "f32":
            value = f"flushed({value})"
        rounding = [ROUNDED[each] for each in how if each in ROUNDED]
        if rounding:
            value = f"{rounding[0]}((f64){value})"
        if "f" in from_ and "f" not in to:
            value = f"to_{to[0]}({value}, {8 * width(to)}, {int(from_ == 'f64')})"
        elif "f" in to:
            value = f"({'f32' if to == 'bf16' else to}){value}"
            if "sat" in how:
                value = f"(f32)fmin(fmax({value}, 0), 1)"
        elif "sat" in how:
            raise KeyError(how)
        return self.write(a[0], to, value)

    def _place(self, parts: Sequence[str], text: str, size: int) -> str:
        found = re.fullmatch(r"\[\s*([%$\w]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if found is None:
            raise KeyError(text)
        base, offset = found[1], found[2] or "0"
        space = next((each for each in parts if each.partition("_")[0] in SPACES), "generic").partition("_")[0]
        writes = int(parts[0] in ("st", "atom", "red"))
        if space == "param" and base in self.symbols:
            return f"within(here, here->given, here->size, {self.symbols[base].place} + {offset}, {size}, 0)"
        start = self.read(base, "u64") if base in self.registers else self.address(base)
        if space == "shared":
            return f"within(here, here->shared, here->room, {start} + {offset}, {size}, {writes})"
        return f"at(here, {start} + {offset}, {size}, {writes})"

    def _ld(self, parts: list[str], a: list[str]) -> str:
        kind, loads = parts[-1], parts[0] != "st"
        data, where = (a[0], a[1]) if loads else (a[1], a[0])
        apart = split(data[1:-1]) if data.startswith("{") else [data]
        size = width(kind)
        done = [f"char* there = {self._place(parts, where, size * len(apart))};"]
        for place, register in enumerate(apart):
            cell = f"(({kind}*)there)[{place}]"
            done.append(self.write(register, kind, cell) if loads else f"{cell} = {self.read(register, kind)};")
        return f"{{ {' '.join(done)} }}"

    _st = _ldu = _ld

    def _atom(self, parts: list[str], a: list[str]) -> str:
        kind = parts[-1]
        how = next(each for each in parts[1:] if each in ATOMICS)
        to, where, *given = a if parts[0] == "atom" else ["_", *a]
        new = ATOMICS[how].format("old", *(self.read(each, kind) for each in given))
        there = f"{kind}* there = ({kind}*){self._place(parts, where, width(kind))};"
        return f"{{ {there} {kind} old = *there; *there = {new}; {self.write(to, kind, 'old')} }}"

    _red = _atom

    # --- The function

    def text(self) -> str:
        """Return the kernel in C: a thread's step, the parameters' offsets and sizes, and the launch of a grid."""
        fields = " ".join(f"{kind} {c_name(name)};" for name, kind in self.registers.items())
        sizes = ", ".join(str(number) for pair in self.parameters for number in pair)
        body = "\n".join(self.lines)
        name = c_name(self.name)
        local = f"char local[{self.local + 16}] __attribute__((aligned(16)));"
        if self.stops:
            kept, start, stop = f"{fields} {local}", "switch (r->stop) { case 0:;", "}"
        else:
            # What nobody goes on with need not be kept, and a compiler makes more of it.
            fields = " ".join(f"{kind} r_{c_name(name)};" for name, kind in self.registers.items())
            kept, start, stop, body = "", f"{fields} {local.replace('local', 'r_local')}", "", body.replace("r->", "r_")
        return f"""
struct Registers_{name} {{ int stop; {kept} }};
static int step_{name}(struct Registers_{name}* r, struct Place* here) {{
{start}
{body}
{stop} return -1; }}
const int parameters_{name}[] = {{ {len(self.parameters)}, {self.size}, {sizes} }};
void run_{name}(const struct Launch* launch) {{
#define REGISTERS struct Registers_{name}
#define STEP step_{name}
#define NAME "{self.name}"
#define SHARED {self.shared}
#define ARGUMENTS {self.size}
#include "grid.h"
}}
"""


def declare_shared(text: str, symbols: dict[str, Symbol], used: int) -> int:
    """Note where a variable of block memory lies; return the bytes that are used then."""
    found = re.search(r"\.shared \.align (\d+) \.b8 ([\w$]+)(?:\[(\d*)\])?$", text)
    if found is None:
        raise NotTranslated(text)
    start = aligned(used, int(found[1]))
    symbols[found[2]] = Symbol("shared", start)
    return start + int(found[3] or 0)


def translate(text: str) -> str:
    """Return C for all kernels of a module."""
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", text.rstrip("\0")), flags=re.S)
    parts, symbols, shared = ['#include "ptx.h"'], dict[str, Symbol](), 0
    outside = re.sub(r"\.entry.*?\n\}", "", text, flags=re.S)
    for line in re.findall(r"^((?:\.extern )?\.shared [^;]*);", outside, re.M):
        shared = declare_shared(" ".join(line.split()), symbols, shared)
    variable = r"\.(?:global|const) \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?(?: = ([^;]*))?;"
    for alignment, kind, name, count, given in re.findall(variable, outside):
        values = "" if not given else f" = {given}" if given.startswith("{") else f" = {{{given}}}"
        parts.append(f"static {kind} v_{c_name(name)}[{count or 1}] __attribute__((aligned({alignment}))){values};")
        symbols[name] = Symbol("global", f"v_{c_name(name)}")
    for name, parameters, body in re.findall(r"\.entry ([\w$]+)\(([^)]*)\)[^{]*\{(.*?)\n\}", text, re.S):
        parts.append(Entry(name, parameters, body, symbols, shared).text())
    return "\n".join(parts)


def main(source: str, target: str, library: str) -> None:
    with open(f"{target}.lock", "w") as lock:  # ranks ask for the same kernel at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if os.path.exists(target):
            return
        code, made = Path(f"{target}.c"), Path(f"{target}.new")
        code.write_text(translate(Path(source).read_text()))
        subprocess.run(["cc", *FLAGS, f"-I{HERE}", "-o", made, code, library, "-lm"], check=True)
        code.unlink()
        made.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
