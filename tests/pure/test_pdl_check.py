"""The check that finds what a kernel accesses before it waits: it has to find it."""

from __future__ import annotations

import pytest

from pdl_check import unwaited

KERNEL = """
.visible .entry one(
    .param .u64 .ptr one_param_0,
    .param .u64 .ptr one_param_1
)
{
    .reg .b64 %%rd<9>;
    ld.param.u64 %%rd1, [one_param_0];
    ld.param.u64 %%rd2, [one_param_1];
    add.s64 %%rd3, %%rd2, 16;
%s
    ret;
}
"""
LOAD = "    ld.global.b32 %r1, [%rd3];\n"
WAIT = "    // begin inline asm\n    {griddepcontrol.wait;}\n    // end inline asm\n"


def check(body: str) -> list[tuple[str, list[int]]]:
    return unwaited(KERNEL.replace("%%", "%").replace("%s\n", body))["one"]


@pytest.mark.parametrize(
    ("body", "early"),
    [
        (WAIT + LOAD, []),
        (LOAD + WAIT, [("ld.global.b32", [1])]),
        ("    @%p1 ld.global.v2.b32 { %r1, %r2 }, [ %rd1 + 8 ];\n" + WAIT, [("ld.global.v2.b32", [0])]),
        ("    ld.shared.b32 %r1, [%r2];\n    st.local.b32 [%r3], %r1;\n" + WAIT, []),
        ("    st.relaxed.gpu.global.u32 [%rd1], %r1;\n" + WAIT, [("st.relaxed.gpu.global.u32", [0])]),
        ("    atom.add.u32 %r1, [%rd1], 1;\n" + WAIT, [("atom.add.u32", [0])]),
        ("    @%p1 bra $L_2;\n" + WAIT + "$L_2:\n" + LOAD, [("ld.global.b32", [1])]),
        ("    @%p1 bra $L_2;\n" + WAIT + LOAD + "    ret;\n$L_2:\n" + WAIT + LOAD, []),
        ("    bra.uni $L_2;\n" + LOAD + "$L_2:\n" + WAIT, []),
        ("$L_1:\n    @%p1 bra $L_1;\n    call.uni other;\n" + WAIT, [("call.uni", [])]),
        (LOAD, [("never waits", []), ("ld.global.b32", [1])]),
    ],
)  # fmt: skip
def test_what_runs_before_the_wait(body: str, early: list[tuple[str, list[int]]]) -> None:
    assert check(body) == early
