"""Reads the text of a compiled program: loops, collectives, and what touches the page pool.

Works on `compiled.as_text()` of TPU and GPU programs. An instruction line looks like

    %name = bf16[16,4096]{1,0:T(8,128)S(1)} fusion(%a, %b), kind=kLoop, calls=%computation, ...

where `S(1)` on TPUs means on-chip memory (VMEM).
"""

import collections
import dataclasses
import functools
import math
import re

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
ENTRY = "ENTRY"

_BITS = {"pred": 8, "token": 0, "opaque": 0, "s4": 4, "u4": 4, "s2": 2, "u2": 2, "f4e2m1fn": 4, "bf16": 16, "c64": 64}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}")


@dataclasses.dataclass(frozen=True)
class Array:
    """One array of an instruction's result."""

    dtype: str  # "bf16"
    shape: tuple[int, ...]
    space: int = 0  # memory space, 0 is HBM

    @property
    def num_bytes(self) -> int:
        """Without the padding of its tiles."""
        return math.prod(self.shape) * _bits(self.dtype) // 8


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"(?:s|u|f)(\d+)", dtype)  # f8e4m3fn too
    return int(match.group(1)) if match else 0


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line."""

    name: str
    result: tuple[Array, ...]  # a tuple's arrays one after the other
    op: str
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False


@dataclasses.dataclass(frozen=True)
class Loop:
    """A while loop."""

    body: str
    condition: str
    trips: int | None  # None where only the device knows
    carry: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    computations: dict[str, list[Instruction]]  # the entry's name is ENTRY
    aliases: dict[int, int]  # output -> donated parameter that it takes the place of, both flat

    def calls(self, instruction: Instruction) -> list[str]:
        """Computations that an instruction names: bodies, branches, fusions."""
        words = re.findall(r"%([\w.\-]+)", instruction.attributes)
        return [word for word in dict.fromkeys(words) if word in self.computations]

    def reachable(self, root: str) -> list[str]:
        """`root` and all it calls, directly or not (tpu7x puts collectives into async computations)."""
        found: dict[str, None] = {}
        stack = [root]
        while stack:
            name = stack.pop()
            if name not in found:
                found[name] = None
                stack += [called for line in self.computations[name] for called in self.calls(line)]
        return list(found)

    @functools.cached_property
    def fused(self) -> frozenset[str]:
        """Computations inside fusions: their results never reach memory."""
        return frozenset(
            called
            for lines in self.computations.values()
            for line in lines
            if line.op == "fusion"
            for called in self.calls(line)
        )

    @property
    def loops(self) -> list[Loop]:
        """All while loops."""
        return [self.loop(line) for lines in self.computations.values() for line in lines if line.op == "while"]

    def loop(self, line: Instruction) -> Loop:
        """The loop of a `while` instruction."""
        condition = _attribute(line, "condition")
        return Loop(_attribute(line, "body"), condition, self._trips(line, condition), line.result)

    def _trips(self, line: Instruction, condition: str) -> int | None:
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line.attributes)
        if known:
            return int(known.group(1))
        # `i < constant`, counted from 0: what lax.scan makes
        lines = {each.name: each for each in self.computations[condition]}
        root = next(each for each in lines.values() if each.is_root)
        constants = [lines[o].attributes for o in root.operands if o in lines and lines[o].op == "constant"]
        if root.op == "compare" and "direction=LT" in root.attributes and len(constants) == 1:
            return int(constants[0])
        if root.op == "fusion":  # the comparison in a fusion of its own
            constants = [each.attributes for each in lines.values() if each.op == "constant"]
            return int(constants[0]) if len(constants) == 1 else None
        return None


def _attribute(line: Instruction, name: str) -> str:
    match = re.search(rf"\b{name}=%?([\w.\-]+)", line.attributes)
    assert match, (name, line)
    return match.group(1)


def parse(text: str) -> Module:
    """Reads `compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    current: list[Instruction] | None = None
    for line in text.splitlines():
        if match := _HEADER.match(line):
            current = computations.setdefault(ENTRY if match.group(1) else match.group(2), [])
        elif line.startswith("}"):
            current = None
        elif current is not None and " = " in line:
            current.append(_instruction(line.strip()))
    header = text.split("\n", 1)[0]
    table = header.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    aliases = {int(out.split(",")[0] or 0): int(param) for out, param in _ALIAS.findall(table)}
    return Module(computations, aliases)


def _instruction(line: str) -> Instruction:
    is_root = line.startswith("ROOT ")
    name, rest = line.removeprefix("ROOT ").split(" = ", 1)
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    shape, rest = rest[:end], rest[end:].lstrip()
    op, rest = rest.split("(", 1)
    end = _closing("(" + rest) - 1
    inside, attributes = rest[:end], rest[end + 1 :]
    if op in ("constant", "parameter"):
        return Instruction(name.lstrip("%"), arrays(shape), op, (), inside, is_root)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name.lstrip("%"), arrays(shape), op, operands, attributes, is_root)


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the first one."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match.group() == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"unbalanced: {text[:80]}")


def arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape such as `(bf16[2,3]{1,0}, s32[])`."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(shape):
        space = re.search(r"S\((\d+)\)", layout)
        numbers = tuple(int(dim.lstrip("<=")) for dim in dims.split(",") if dim)
        found.append(Array(dtype, numbers, int(space.group(1)) if space else 0))
    return tuple(found)


def layer_loop(module: Module, num_layers: int, pool_elements: int) -> Loop | None:
    """The scan over layers: `num_layers` trips with the pool in the carry."""
    for loop in module.loops:
        if loop.trips == num_layers and any(math.prod(array.shape) == pool_elements for array in loop.carry):
            return loop
    return None


def collectives(module: Module, root: str) -> collections.Counter[str]:
    """Collectives in `root` and all it calls, by kind; asynchronous ones counted where they start."""
    found: collections.Counter[str] = collections.Counter()
    for name in module.reachable(root):
        for line in module.computations[name]:
            kind = line.op.removesuffix("-start")
            if kind in COLLECTIVES:
                found[kind] += 1
    return found


def large_results(module: Module, layer_elements: int, inner: tuple[int, ...]) -> collections.Counter[str]:
    """Operations outside fusions that make an array of one or more layers' pages, by kind.

    Args:
        module: the program.
        layer_elements: of one layer of the pool; multiples of it count.
        inner: sizes of the pool's axes but the first; the last one has to be the same.

    In a clean step there is one: the kernel that writes the pool in place (`custom-call[aliased]`), or the fusion that
    scatters into it (`fusion[update]`).
    """
    free = {
        "parameter",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "while",
        "conditional",
        "call",
        "optimization-barrier",
    }
    found: collections.Counter[str] = collections.Counter()
    for name, lines in module.computations.items():
        if name in module.fused:
            continue
        for line in lines:
            if line.op in free or line.op.endswith("-done"):
                continue
            if any(_may_be_pages(array, layer_elements, inner) for array in line.result):
                found[line.op + _in_place(module, line)] += 1
    return found


def _in_place(module: Module, line: Instruction) -> str:
    """ "[aliased]", "[update]", or "" where the result is new memory."""
    if "output_to_operand_aliasing" in line.attributes:
        return "[aliased]"
    if line.op != "fusion":
        return ""
    lines = {each.name: each for each in module.computations[module.calls(line)[0]]}
    root = next(each for each in lines.values() if each.is_root)
    while root.op in ("bitcast", "convert") and root.operands:
        root = lines[root.operands[0]]
    return "[update]" if root.op == "scatter" else ""


def _may_be_pages(array: Array, layer_elements: int, inner: tuple[int, ...]) -> bool:
    return array.shape[-1:] == inner[-1:] and _are_layers(array, layer_elements)


def _are_layers(array: Array, layer_elements: int) -> bool:
    elements = math.prod(array.shape)
    return elements > 0 and elements % layer_elements == 0


def copied_arguments(module: Module) -> int:
    """Bytes of copies that have type and shape of an argument: the program lays it out otherwise before it works on it.

    By shape, for on its way to the copy an argument may pass through other memory, in pieces, or into called computations.
    Copies inside fusions are not seen; what they move counts in `traffic`.
    """
    arguments = {
        (array.dtype, array.shape)
        for line in module.computations[ENTRY]
        if line.op == "parameter"
        for array in line.result
    }
    return sum(
        array.num_bytes
        for name, lines in module.computations.items()
        if name not in module.fused
        for line in lines
        if line.op == "copy"
        for array in line.result
        if array.shape and (array.dtype, array.shape) in arguments
    )


def scatters(module: Module, layer_elements: int) -> int:
    """Scatters into arrays of one or more layers' pages, fused or not."""
    return sum(
        line.op == "scatter" and any(_are_layers(array, layer_elements) for array in line.result)
        for lines in module.computations.values()
        for line in lines
    )
