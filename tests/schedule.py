# SPDX-License-Identifier: Apache-2.0
"""Whether emulated devices can end up waiting for each other: what XLA's schedule for CPU leaves open."""

import re

COLLECTIVE = re.compile(r" (ragged-)?(all-to-all|all-gather|all-reduce|collective-permute|reduce-scatter)(-start)?\(")


def races(program: str) -> list[tuple[str, str]]:
    """Loops, calls and branches of a compiled program with collectives, each with a later one that does not need it.

    XLA's runtime for CPU starts such a collective while the loop still runs, at another point of it on every
    device. Each pair may hang; a collective that comes before a loop is over when that begins.
    """
    computations: dict[str, list[tuple[str, str, set[str]]]] = {}
    for line in program.splitlines():
        names = re.findall(r"%([\w.-]+)", line)
        if names and line.endswith("{") and not line.startswith(" "):
            computations[names[0]] = lines = []
        elif names and " = " in line:
            lines.append((names[0], line, set(names[1:])))
    known: dict[str, bool] = {}

    def calls(names: set[str]) -> bool:
        """Whether there are collectives in a computation of these names."""
        for name in names & computations.keys() - known.keys():
            known[name] = any(moves(line, names) for _, line, names in computations[name])
        return any(known.get(name) for name in names)

    def moves(line: str, names: set[str]) -> bool:
        return calls(names) or bool(COLLECTIVE.search(line))

    found = []
    for lines in computations.values():
        for i, (loop, _, names) in enumerate(lines):
            after = {loop} if calls(names) else set()
            for name, line, names in lines[i + 1 :] if after else ():
                if names & after:
                    after.add(name)
                elif moves(line, names):
                    found.append((loop, name))
    return found
