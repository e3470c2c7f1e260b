# SPDX-License-Identifier: Apache-2.0
"""Read a program compiled for TPUs: its operations, bytes, collectives, and the roofline time that follows from them.

XLA's own analysis counts the body of a loop once. Here it counts as often as the loop runs, where the text has the
number of trips; where it has none (the rounds of an exchange), once. Of a conditional, the costliest branch counts.

A collective may be asynchronous in three ways: as a pair of instructions (`all-gather-start`), wrapped in a pair
`async-start`, or as a chain of fusions. The first fusion of a chain starts the collective, those that follow move it on
while they compute, and the last waits for its end. A fusion that keeps only a slice of an all-reduce is a
reduce-scatter.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

COLLECTIVES = (
    "all-to-all", "all-gather", "all-reduce", "collective-permute", "reduce-scatter", "ragged-all-to-all",
)  # fmt: skip
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+\w*)\[([\d,]*)\](\{[^}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (.*)$")
_SLICES = ("dynamic-slice", "gather")
# Instructions that move nothing.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id", "iota",
    "opt-barrier", "add-dependency",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device can do.

    Attributes:
        operations: bf16 operations a second.
        bandwidth: bytes a second of its memory.
        links: bytes a second that it can send to other chips, over all links.
        memory: bytes.
        clock: cycles a second, in which the compiler's estimates count.
    """

    operations: float
    bandwidth: float
    links: float
    memory: float
    clock: float


# From the vendor's data sheets, by the start of JAX's name of the device.
CHIPS = {
    "TPU v5 lite": Chip(197e12, 819e9, 200e9, 16 * 2**30, 1.5e9),
    "TPU v5": Chip(459e12, 2765e9, 600e9, 95 * 2**30, 1.75e9),
    "TPU v6 lite": Chip(918e12, 1640e9, 400e9, 32 * 2**30, 1.75e9),
}


def chip_of(device_kind: str) -> Chip | None:
    """Return what a kind of device can do; None if it is not known."""
    return next((chip for name, chip in CHIPS.items() if device_kind.startswith(name)), None)


def needed_memory(memory: Any) -> float:
    """Return the bytes that a program needs on a device, from its `memory_analysis()`.

    The compiler for TPUs counts results as temporary memory, but not all of them in every program; its peak has them.
    """
    return max(memory.argument_size_in_bytes + memory.temp_size_in_bytes, memory.peak_memory_in_bytes)


@dataclasses.dataclass
class Costs:
    """What one run of a program costs a device.

    Attributes:
        operations: floating-point operations of matrix products and of kernels that declare theirs.
        bytes: read from and written to the device's memory.
        kernel_operations: those of kernels.
        kernel_bytes: the same.
        cycles: the compiler's estimates of its operations' time. It has none for kernels and exchanges.
        wire: bytes that leave the device, by kind of collective.
        count: number of collectives, by kind.
        hidden: wire bytes of asynchronous collectives with work between their start and their end, by kind.
        unknown_loops: loops whose number of trips the text does not have.
    """

    operations: float = 0.0
    bytes: float = 0.0
    kernel_operations: float = 0.0
    kernel_bytes: float = 0.0
    cycles: float = 0.0
    wire: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    count: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    hidden: dict[str, float] = dataclasses.field(default_factory=lambda: collections.defaultdict(float))
    unknown_loops: float = 0.0

    def add(self, other: "Costs", times: float = 1.0) -> None:
        """Add `times` runs of another program."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                for kind, part in value.items():
                    getattr(self, name)[kind] += times * part
            else:
                setattr(self, name, getattr(self, name) + times * value)

    @property
    def hidden_share(self) -> float:
        """Return the share of the wire bytes that are sent beside other work; 1 if nothing is sent."""
        sent = sum(self.wire.values())
        return sum(self.hidden.values()) / sent if sent else 1.0

    def times(self, chip: Chip) -> dict[str, float]:
        """Return the seconds that operations, memory and links take at least; the largest is the roofline time."""
        return {
            "operations": self.operations / chip.operations,
            "memory": self.bytes / chip.bandwidth,
            "links": sum(self.wire.values()) / chip.links,
        }


class Instruction(NamedTuple):
    """One line of a program. `value` is that of a constant; `attributes` is all that follows the operands."""

    name: str
    result: str
    opcode: str
    operands: list[str]
    value: str
    attributes: str
    root: bool


Body = dict[str, Instruction]


class Program:
    """The computations of a compiled program, from the text of `compiled.as_text()`."""

    def __init__(self, text: str):
        """Parse the text."""
        self._bodies: dict[str, Body] = {}
        self._known: dict[str, Costs] = {}
        self._entry, body = "", {}
        for line in text.splitlines():
            if header := _COMPUTATION.match(line):
                body = self._bodies.setdefault(header[2], {})
                self._entry = header[2] if header[1] else self._entry
            elif match := _INSTRUCTION.match(line):
                body[match[2]] = _instruction(match[2], match[3], bool(match[1]))

    def costs(self) -> Costs:
        """Add up what one run of the program costs a device."""
        return self._total(self._entry)

    def _called(self, x: Instruction, key: str) -> str:
        """Return the name of the computation that an instruction calls; empty if it has no such attribute."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", x.attributes)
        return match[1] if match else ""

    def _fused(self, x: Instruction) -> Body:
        return self._bodies.get(self._called(x, "calls"), {}) if x.opcode == "fusion" else {}

    def _total(self, name: str) -> Costs:
        """Add up a computation, in its order, which is that of the schedule."""
        if name not in self._known:
            body = self._bodies.get(name, {})
            order, each = [*body.values()], [self._cost(x, body) for x in body.values()]
            ends = {start: i for i, x in enumerate(order) if x.opcode.endswith("-done") for start in x.operands}
            chains = [self._chain(x) for x in order]
            stops = {chain: i for i, (chain, part) in enumerate(chains) if part == "Done"}
            ends |= {x.name: stops[c] for x, (c, part) in zip(order, chains, strict=True) if part == "Start"}
            self._known[name] = total = Costs()
            for i, (x, cost) in enumerate(zip(order, each, strict=True)):
                beside = range(i + 1, ends.get(x.name, 0))
                if any(each[j].operations or each[j].bytes for j in beside if not order[j].opcode.endswith("-start")):
                    cost.hidden = cost.wire
                total.add(cost)
        return self._known[name]

    def _cost(self, x: Instruction, body: Body) -> Costs:
        """Cost of one instruction, with all runs of the computations that it calls."""
        total = Costs()
        if x.opcode == "while":
            trips = self._trips(x, body)
            total.add(self._total(self._called(x, "body")), 1 if trips is None else trips)
            total.unknown_loops += trips is None
        elif x.opcode == "conditional":
            names = re.search(r"branch_computations=\{([^}]*)\}", x.attributes)
            text = (
                names[1] if names else f"{self._called(x, 'true_computation')} {self._called(x, 'false_computation')}"
            )
            branches = [self._total(name) for name in re.findall(r"[\w.\-]+", text)]
            total.add(max(branches, key=lambda cost: (cost.operations, cost.bytes)))
        elif x.opcode in ("call", "async-start"):
            total.add(self._total(self._called(x, "to_apply") or self._called(x, "calls")))
        elif x.opcode not in _FREE and not x.opcode.endswith("-done"):
            total.operations, total.bytes = self._operations(x, body), self._traffic(x, body)
            if x.opcode == "custom-call":
                total.kernel_operations, total.kernel_bytes = total.operations, total.bytes
            cycles = re.search(r'estimated_cycles":"(\d{1,15})"', x.attributes)  # 2^63 - 1: no estimate
            total.cycles = int(cycles[1]) if cycles else 0
            for y, inside in ((x, body), *((y, self._fused(x)) for y in self._fused(x).values())):
                kind = y.opcode.removesuffix("-start")
                if kind in COLLECTIVES and self._chain(x)[1] in ("", "Start"):
                    users = [z.opcode for z in inside.values() if y.name in z.operands]
                    kind = "reduce-scatter" if kind == "all-reduce" and {*users} == {"dynamic-slice"} else kind
                    total.wire[kind] += _sent(kind, y, inside)
                    total.count[kind] += 1
        return total

    def _chain(self, x: Instruction) -> tuple[str, str]:
        """Return the number of the chain that a fusion is part of, and which part: Start, Step or Done; empty: none."""
        inside = self._fused(x).values()
        found = (re.search(r'chain_id="(\d+)"', y.attributes) for y in inside if y.opcode in COLLECTIVES)
        if (chain := next(filter(None, found), None)) is None:
            return "", ""
        calls = (re.search(r'"AsyncCollective(Start|Done)"', y.attributes) for y in inside)
        call = next(filter(None, calls), None)
        return chain[1], call[1] if call else "Step"

    def _trips(self, loop: Instruction, outside: Body) -> int | None:
        """Count the runs of a loop: known, or a counter goes from a constant (0 if not in sight) to a constant."""
        if known := re.search(r'known_trip_count"?:\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition, body = (self._bodies.get(self._called(loop, key), {}) for key in ("condition", "body"))
        compare = next((x for x in condition.values() if x.opcode == "compare" and "=LT" in x.attributes), None)
        if compare is None or (last := _number(compare.operands[1], condition)) is None:
            return None
        index = re.search(r"index=(\d+)", condition[compare.operands[0]].attributes)
        if index is None:
            return None
        # What goes in, and what the body makes of it: a sum with a constant that is not 0, or else the next number.
        first, after = outside.get(loop.operands[0]), next((x for x in body.values() if x.root), None)
        counter = lambda x: x.operands[int(index[1])] if x and x.opcode == "tuple" else ""
        grown = body.get(counter(after))
        steps = [_number(name, body) for name in grown.operands] if grown and grown.opcode == "add" else []
        return -(-(last - (_number(counter(first), outside) or 0)) // next(filter(None, steps), 1))

    def _operations(self, x: Instruction, body: Body) -> float:
        """Count the operations of a matrix product, of the products in a fusion, or those that a kernel declares."""
        if x.opcode in ("dot", "convolution"):
            return _product(x, *(body[name].result for name in x.operands[:2]))
        if x.opcode == "custom-call":
            return _declared("flops", x) or 0.0
        inside = self._fused(x)
        return sum(self._operations(y, inside) for y in inside.values())

    def _traffic(self, x: Instruction, body: Body) -> float:
        """Count the bytes that an instruction reads from and writes to the device's memory.

        A fusion that slices an operand reads the slice only, and one that updates a slice of an operand writes it only.
        """
        if x.opcode.endswith("-start"):  # the result holds the operands, too
            return size(x.result)
        if x.opcode == "custom-call" and (declared := _declared("bytes_accessed", x)) is not None:
            return declared
        inside = self._fused(x)
        if not inside:
            if x.opcode in _SLICES:
                return 2 * size(x.result)
            if x.opcode == "dynamic-update-slice":
                return 2 * size(body[x.operands[1]].result)
            return size(x.result) + sum(size(body[name].result) for name in x.operands if name in body)
        users, origin = collections.defaultdict(list), {}
        for y in inside.values():
            for name in y.operands:
                users[origin.get(name, name)].append(y)
            if y.opcode == "bitcast":
                origin[y.name] = origin.get(y.operands[0], y.operands[0])
        read, written = 0.0, size(x.result)
        # What a chain's collective reads and writes passes through all of its fusions, and counts in the first.
        part, passed = self._chain(x)[1], set[str]()
        if part:
            aliased = re.findall(r"\{\d*\}: \((\d+), ", x.attributes)  # numbers of operands, one for each such result
            written -= sum(size(body[x.operands[int(n)]].result) for n in aliased)
            passed = {y.name for y in inside.values() if y.value in aliased}
            passed |= {name for y in inside.values() if y.opcode in COLLECTIVES for name in y.operands}
        for y in (y for y in inside.values() if y.opcode == "parameter" and (part == "Start" or y.name not in passed)):
            uses = [u for u in users[y.name] if u.opcode != "bitcast"]
            first = all(origin.get(u.operands[0], u.operands[0]) == y.name for u in uses)
            if first and uses and all(u.opcode in (*_SLICES, "dynamic-update-slice") for u in uses):
                read += sum(size(u.result, anywhere=True) for u in uses if u.opcode in _SLICES)
                for u in (u for u in uses if u.opcode not in _SLICES):
                    written += size(inside[u.operands[1]].result, anywhere=True) - size(u.result)
            else:
                read += size(y.result)
        return read + max(written, 0.0)


def _instruction(name: str, text: str, root: bool) -> Instruction:
    """Cut the text after `=` into the type of the result, opcode, operands and attributes."""
    start = _closing(text, 0) if text.startswith("(") else 0  # a tuple's type may hold spaces
    match = re.compile(r" ([a-z][\w\-]*)\(").search(text, start)
    if match is None:
        return Instruction(name, text, "", [], "", "", root)
    stop = _closing(text, match.end() - 1)
    inside = text[match.end() : stop - 1]
    return Instruction(
        name, text[: match.start()], match[1], re.findall(r"%([\w.\-]+)", inside), inside, text[stop:], root
    )


def _declared(what: str, kernel: Instruction) -> float | None:
    """Return what a kernel declares as its cost; None if it declares none."""
    found = re.search(rf'cost_estimate":\{{[^}}]*"{what}":"?(\d+)', kernel.attributes)
    return float(found[1]) if found else None


def _closing(text: str, start: int) -> int:
    """Return the place after the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return match.end()
    return len(text)


def _number(name: str, body: Body) -> int | None:
    """Return the value of an integer constant; None if it is none."""
    x = body.get(name)
    return int(x.value) if x and x.opcode == "constant" and x.value.lstrip("-").isdigit() else None


def _arrays(result: str) -> Iterator[tuple[float, list[int], bool]]:
    """Yield bytes of an element, shape, and whether it lies in the device's memory, of every array of a type's text."""
    for kind, dims, layout in _ARRAY.findall(result):
        digits = re.search(r"\d+", kind)
        bits = 8 if kind == "pred" else int(digits[0] if digits else 32)
        yield bits / 8, [int(n) for n in dims.split(",") if n], "S(" not in layout


def size(result: str, anywhere: bool = False) -> float:
    """Return the bytes of a result that lie in the device's memory; with `anywhere`, also those kept on the chip."""
    return sum(width * math.prod(shape) for width, shape, memory in _arrays(result) if memory or anywhere)


def _product(x: Instruction, left: str, right: str) -> float:
    """Count the operations of a matrix product: two for each product of two elements that are there.

    XLA for TPU writes products as convolutions, and batches as windows, most of whose places hold padding.
    """
    (_, out, _), (_, a, _), (_, b, _) = (next(_arrays(text)) for text in (x.result, left, right))
    if x.opcode == "dot":
        dims = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", x.attributes)
        return 2.0 * math.prod(out) * math.prod(a[int(n)] for n in (dims[1] if dims else "").split(",") if n)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", x.attributes)
    if labels is None:
        return 0.0
    total = 2.0 * math.prod(out) * b[labels[2].index("i")]
    window = re.search(r"window=\{(.*?)\}", x.attributes)
    fields = {key: value.split("x") for key, value in re.findall(r"(\w+)=([\dx_\-]+)", window[1] if window else "")}
    for axis in range(len(fields.get("size", ()))):
        places, inputs = out[labels[3].index(str(axis))], a[labels[1].index(str(axis))]
        count = lambda key, axis=axis: int(fields[key][axis].split("_")[0]) if key in fields else 1
        low = count("pad") if "pad" in fields else 0
        spread = count("lhs_dilate")
        at = (k * count("rhs_dilate") - low + o * count("stride") for k in range(count("size")) for o in range(places))
        total *= sum(i % spread == 0 and 0 <= i <= (inputs - 1) * spread for i in at) / places
    return total


def _sent(kind: str, x: Instruction, body: Body) -> float:
    """Return the bytes that a device sends in a collective; in a ragged one, all that fits into both its buffers."""
    given = [size(body[name].result, anywhere=True) for name in x.operands if name in body]
    groups = re.search(r"replica_groups=(?:\[\d+,(\d+)\]|\{\{([\d,]*)\})", x.attributes)
    mesh = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", x.attributes)
    n = 2
    if groups:
        n = int(groups[1]) if groups[1] else len(groups[2].split(","))
    elif mesh:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        n = math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    factor = {
        "all-gather": n - 1,
        "all-reduce": 2 * (n - 1) / n,
        "reduce-scatter": (n - 1) / n,
        "all-to-all": (n - 1) / n,
    }
    return min(given[:2]) if kind == "ragged-all-to-all" else factor.get(kind, 1) * sum(given)
