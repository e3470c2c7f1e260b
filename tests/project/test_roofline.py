# SPDX-License-Identifier: Apache-2.0
"""Operations, bytes and collectives of a compiled program are counted by hand on short texts, and on a real one."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from dsv4_jax.roofline import CHIPS, Costs, Program, chip_of, needed_memory, size

LOOP = """
%body (p: (s32[], f32[4,8], f32[8,8])) -> (s32[], f32[4,8], f32[8,8]) {
  %p = (s32[]{:T(128)}, f32[4,8]{1,0:T(8,128)}, f32[8,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,8]{1,0} get-tuple-element(%p), index=2
  %STEP = s32[] constant(STEP)
  %next = s32[] add(%i, %STEP)
  %y = f32[4,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[4,8], f32[8,8]) tuple(%next, %y, %w)
}

%condition (q: (s32[], f32[4,8], f32[8,8])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %last = LAST
  ROOT %less = pred[] compare(%j, %last), direction=LT
}

ENTRY %main (x: f32[4,8], w: f32[8,8]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f32[8,8]{1,0} parameter(1)
  %first = s32[] constant(1)
  %in = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) tuple(%first, %x, %w)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,8]{1,0}) while(%in), condition=%condition, body=%body
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


@pytest.mark.parametrize(
    "step, last, trips, unknown",
    [(1, "s32[] constant(6)", 5, 0), (2, "s32[] constant(6)", 3, 0), (1, "s32[] get-tuple-element(%q), index=0", 1, 1)],
)
def test_the_body_of_a_loop_counts_once_a_trip(step, last, trips, unknown):
    found = Program(LOOP.replace("STEP", str(step)).replace("LAST", last)).costs()
    assert found.operations == trips * 2 * 4 * 8 * 8 and found.unknown_loops == unknown
    moved = 4 * (4 * 8 + 8 * 8 + 4 * 8) + 4 * 3  # the product, and the sum of the counter
    assert found.bytes == trips * moved


EXCHANGES = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %gather = (bf16[8,128]{1,0}, bf16[32,128]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %w = bf16[8,128]{1,0} add(%x, %x)
  %gathered = bf16[32,128]{1,0} all-gather-done(%gather)
  %start = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[]{:S(2)}) collective-permute-start(%w), source_target_pairs={{0,1}}
  %copy-start = (bf16[8,128]{1,0:S(1)}, bf16[8,128]{1,0}, u32[]{:S(2)}) copy-start(%x)
  %kept = bf16[8,128]{1,0:S(1)} copy-done(%copy-start)
  %sent = bf16[8,128]{1,0} collective-permute-done(%start)
  ROOT %all = bf16[8,128]{1,0} all-reduce(%sent), replica_groups=mesh['a'=2,'b'=4] {'a','b'}, to_apply=%sum
}
"""


def test_a_collective_is_hidden_if_work_stands_between_its_start_and_its_end():
    found, row = Program(EXCHANGES).costs(), 2 * 8 * 128
    assert found.count == {"all-gather": 1, "collective-permute": 1, "all-reduce": 1}
    assert found.wire == {"all-gather": 3 * row, "collective-permute": row, "all-reduce": 2 * row * 7 / 8}
    assert found.hidden == {"all-gather": 3 * row}  # a copy is no work that hides
    assert found.hidden_share == pytest.approx(3 / (4 + 7 / 4)) and Costs().hidden_share == 1
    # all-gather 5 rows, add 3, permute 2, the copy's source 1 (its target stays on the chip), all-reduce 2
    assert found.bytes == 13 * row


FUSIONS = """
%read (p: f32[16,8,4], i: s32[]) -> f32[8,4] {
  %p = f32[16,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %b = f32[16,32]{1,0} bitcast(%p)
  %s = f32[1,32]{1,0} dynamic-slice(%b, %i, %i), dynamic_slice_sizes={1,32}
  ROOT %r = f32[8,4]{1,0} bitcast(%s)
}

%write (p: f32[16,8,4], u: f32[1,8,4], i: s32[]) -> f32[16,8,4] {
  %p = f32[16,8,4]{2,1,0} parameter(0)
  %u = f32[1,8,4]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %d = f32[16,8,4]{2,1,0} dynamic-update-slice(%p, %u, %i, %i, %i)
}

%small (s: f32[8,4]) -> f32[8,4] {
  ROOT %s = f32[8,4]{1,0} parameter(0)
}

%large (l: f32[8,4]) -> f32[8,4] {
  %l = f32[8,4]{1,0} parameter(0)
  ROOT %k = f32[8,4]{1,0} custom-call(%l), custom_call_target="tpu_custom_call", backend_config={"cost_estimate":{"flops":"77","bytes_accessed":"9"}}
}

ENTRY %main (p: f32[16,8,4], i: s32[], c: pred[]) -> f32[8,4] {
  %p = f32[16,8,4]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %c = pred[] parameter(2)
  %slice = f32[8,4]{1,0} fusion(%p, %i), kind=kLoop, calls=%read, backend_config={"window_config":{"estimated_cycles":"50"}}
  %same = f32[1,8,4]{2,1,0} bitcast(%slice)
  %put = f32[16,8,4]{2,1,0} fusion(%p, %same, %i), kind=kLoop, calls=%write, backend_config={"estimated_cycles":"9223372036854775807"}
  ROOT %out = f32[8,4]{1,0} conditional(%c, %slice, %slice), branch_computations={%small, %large}
}
"""  # noqa: E501 - as the compiler writes them


def test_fusions_move_their_slices_only_and_the_costlier_branch_counts():
    found, slice_ = Program(FUSIONS).costs(), 4 * 8 * 4
    assert found.bytes == (2 * slice_ + 4) + (2 * slice_ + 4) + 9  # the last is what the kernel declares
    assert found.kernel_operations == 77 and found.kernel_bytes == 9
    assert found.operations == 77 and found.cycles == 50  # the largest integer stands for no estimate


CHAIN = """
%start (p: bf16[8,128]) -> (bf16[8,128], bf16[32,128], u32[]) {
  %p = bf16[8,128]{1,0} parameter(0)
  %g = bf16[32,128]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="2"}
  ROOT %s = (bf16[8,128]{1,0}, bf16[32,128]{1,0}, u32[]{:S(2)}) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%step (p: bf16[8,128], q: bf16[32,128], f: u32[], x: bf16[8,128]) -> (bf16[8,128], bf16[8,128], bf16[32,128], u32[]) {
  %p = bf16[8,128]{1,0} parameter(0)
  %q = bf16[32,128]{1,0} parameter(1)
  %f = u32[]{:S(2)} parameter(2)
  %x = bf16[8,128]{1,0} parameter(3)
  %d = bf16[8,128]{1,0} add(%x, %x)
  %g = bf16[32,128]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="2"}
  ROOT %t = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, bf16[32,128]{1,0}, u32[]{:S(2)}) tuple(%d, %p, %q, %f)
}

%done (p: bf16[8,128], q: bf16[32,128], f: u32[]) -> bf16[32,128] {
  %p = bf16[8,128]{1,0} parameter(0)
  %q = bf16[32,128]{1,0} parameter(1)
  %f = u32[]{:S(2)} parameter(2)
  %g = bf16[32,128]{1,0} all-gather(%p), channel_id=7, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="2"}
  ROOT %r = bf16[32,128]{1,0} custom-call(%g, %q, %f), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (x: bf16[8,128]) -> bf16[32,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  %begin = (bf16[8,128]{1,0}, bf16[32,128]{1,0}, u32[]{:S(2)}) fusion(%x), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%start
  %p = bf16[8,128]{1,0} get-tuple-element(%begin), index=0
  %q = bf16[32,128]{1,0} get-tuple-element(%begin), index=1
  %f = u32[]{:S(2)} get-tuple-element(%begin), index=2
  STEP
  ROOT %end = bf16[32,128]{1,0} fusion(%p, %q, %f), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%done
}
"""  # noqa: E501
STEP = "%work = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, bf16[32,128]{1,0}, u32[]{:S(2)}) fusion(%p, %q, %f, %x), kind=kLoop, output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (2, {})}, calls=%step"  # noqa: E501


@pytest.mark.parametrize("step, hidden", [(STEP, 3), ("", 0)])
def test_a_chain_of_fusions_is_one_collective(step, hidden):
    """What moves a collective on beside its own work neither sends again nor reads and writes the gathered array."""
    found, row = Program(CHAIN.replace("STEP", step)).costs(), 2 * 8 * 128
    assert found.count == {"all-gather": 1} and found.wire == {"all-gather": 3 * row}
    assert sum(found.hidden.values()) == hidden * row
    assert found.bytes == row + 4 * row + (2 * row if step else 0)  # the gather, and the step's own sum


WRAPPED = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%scatter (p: f32[32,128]) -> f32[8,128] {
  %p = f32[32,128]{1,0} parameter(0)
  %r = f32[32,128]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%sum
  %i = u32[] partition-id()
  %o = u32[] constant(0)
  ROOT %s = f32[8,128]{1,0} dynamic-slice(%r, %i, %o), dynamic_slice_sizes={8,128}
}

%wrapped (p: f32[8,128]) -> f32[32,128] {
  %p = f32[8,128]{1,0} parameter(0)
  ROOT %g = f32[32,128]{1,0} all-gather(%p), replica_groups={{0,1,2,3}}, dimensions={0}
}

ENTRY %main (x: f32[32,128]) -> f32[32,128] {
  %x = f32[32,128]{1,0} parameter(0)
  %part = f32[8,128]{1,0} fusion(%x), kind=kCustom, calls=%scatter
  %start = ((f32[8,128]{1,0}), f32[32,128]{1,0}, s32[]{:S(2)}) async-start(%part), calls=%wrapped
  %work = f32[8,128]{1,0} add(%part, %part)
  ROOT %done = f32[32,128]{1,0} async-done(%start)
}
"""


def test_wrapped_collectives_count_and_a_slice_of_a_sum_is_a_reduce_scatter():
    found, row = Program(WRAPPED).costs(), 4 * 8 * 128
    assert found.count == {"reduce-scatter": 1, "all-gather": 1}
    assert found.wire == {"reduce-scatter": 3 * row, "all-gather": 3 * row}
    assert found.hidden == {"all-gather": 3 * row}
    assert found.bytes == (4 + 1) * row + (1 + 4) * row + 3 * row


BATCHED = """
ENTRY %main (a: bf16[3,16,32], b: bf16[3,32,64]) -> bf16[3,16,64] {
  %a = bf16[3,16,32]{2,1,0} parameter(0)
  %b = bf16[3,32,64]{2,1,0} parameter(1)
  ROOT %c = bf16[3,16,64]{2,1,0} convolution(%a, %b), window={size=3 stride=2 pad=2_2 lhs_dilate=3}, dim_labels=0bf_0io->0bf
}
"""  # noqa: E501


def test_padding_of_a_convolution_is_no_work():
    """The window visits 3 places for each of 3 outputs, of which only some hold one of the 3 spread inputs."""
    held = sum((k - 2 + 2 * o) % 3 == 0 and 0 <= k - 2 + 2 * o <= 6 for k in range(3) for o in range(3))
    assert held == 3 and Program(BATCHED).costs().operations == 2 * held * 16 * 32 * 64


def test_a_real_program_has_the_operations_of_its_products():
    def layers(x, w):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    text = jax.jit(layers).lower(jnp.ones((24, 16)), jnp.ones((7, 16, 16))).compile().as_text()
    found = Program(text).costs()
    assert found.operations == 7 * 2 * 24 * 16 * 16 and not found.unknown_loops


def test_the_roofline_time_is_the_longest_of_three():
    chip = chip_of("TPU v5p")
    assert chip == CHIPS["TPU v5"] and chip_of("TPU v5 lite") is CHIPS["TPU v5 lite"] and chip_of("cpu") is None
    found = Costs(operations=459e12, bytes=2 * 2765e9)
    found.wire["all-gather"] = 1800e9
    assert found.times(chip) == pytest.approx({"operations": 1, "memory": 2, "links": 3})


def test_sizes_are_bytes_of_the_types():
    assert size("(bf16[2,3]{1,0:T(8,128)}, pred[5], s4[4], u32[]{:S(2)}, f32[])") == 12 + 5 + 2 + 4
    assert size("f8e4m3fn[8,2]{1,0:S(1)}") == 0 and size("f8e4m3fn[8,2]{1,0:S(1)}", anywhere=True) == 16


def test_the_memory_of_a_program_holds_its_peak():
    """The compiler for TPUs leaves results out of a program's temporary memory, or not."""
    sizes = dict(argument_size_in_bytes=10, temp_size_in_bytes=7)
    assert needed_memory(SimpleNamespace(**sizes, peak_memory_in_bytes=15)) == 17
    assert needed_memory(SimpleNamespace(**sizes, peak_memory_in_bytes=20)) == 20
