"""LLVM IR of the product of a few rows with a matrix in blocks, for one form of blocks. Text in, text out.

A *tile* is 16 rows of the matrix over one block of columns (``forms`` has its bytes). One call computes
``y [M, O] = x [M, I] · Wᵀ`` with ``y[:, o] = Σ_b (scale_b Σ_k code_k x_k + offset_b Σ_k x_k)``: codes are widened to
float32 as they are, scales are applied once a block, everything is added in float32. Lanes are rows of the matrix, so
nothing is ever added across lanes. Row groups are shared among the threads of torch's own OpenMP pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from freetoken_kernels_llvm.forms import HALF_LANES, TILE_ROWS, Form

WIDEST = 6  # rows of x at once: twelve sums of eight lanes, and four registers for codes and x
_V, _H = "<8 x float>", "<8 x half>"

_HEAD = """
declare void @GOMP_parallel(void (i8*)*, i8*, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)
%Job = type { i8*, float*, float*, float*, i64, i64, i64, i64 }
"""


def module(form: Form) -> str:
    """The whole module of ``form``; its one public function is ``run``."""
    groups = "\n".join(_group(form, rows) for rows in range(1, WIDEST + 1))
    sums = "  call void @sums(float* %x, float* %sums, i64 %rows, i64 %blocks, i64 %stride)" if form.offsets else ""
    return "\n".join((_HEAD, _sums(form), groups, _share(form), _RUN.replace("{sums}", sums)))


_RUN = """
define void @run(i8* %w, float* %x, float* %y, float* %sums, i64 %groups, i64 %blocks, i64 %rows, i64 %stride,
                 i32 %threads) {
{sums}
  %job = alloca %Job
  %j0 = insertvalue %Job undef, i8* %w, 0
  %j1 = insertvalue %Job %j0, float* %x, 1
  %j2 = insertvalue %Job %j1, float* %y, 2
  %j3 = insertvalue %Job %j2, float* %sums, 3
  %j4 = insertvalue %Job %j3, i64 %groups, 4
  %j5 = insertvalue %Job %j4, i64 %blocks, 5
  %j6 = insertvalue %Job %j5, i64 %rows, 6
  %j7 = insertvalue %Job %j6, i64 %stride, 7
  store %Job %j7, %Job* %job
  %raw = bitcast %Job* %job to i8*
  call void @GOMP_parallel(void (i8*)* @share, i8* %raw, i32 %threads, i32 0)
  ret void
}
"""


def _sums(form: Form) -> str:
    """``sums [rows, blocks]``: what each row of ``x`` adds up to over each block."""
    tree: list[str] = []
    names = [f"%p{i}" for i in range(form.block // 8)]
    loads = "\n".join(
        f"  %a{i} = getelementptr float, float* %at, i64 {8 * i}\n  %v{i} = bitcast float* %a{i} to {_V}*\n"
        f"  %p{i} = load {_V}, {_V}* %v{i}, align 4"
        for i in range(form.block // 8)
    )
    while len(names) > 1:
        left, right = names[0], names[1]
        name = f"%t{len(tree)}"
        tree.append(f"  {name} = fadd {_V} {left}, {right}")
        names = [*names[2:], name]
    return f"""
declare float @llvm.vector.reduce.fadd.v8f32(float, {_V})
define internal void @sums(float* %x, float* %sums, i64 %rows, i64 %blocks, i64 %stride) {{
entry:
  br label %row
row:
  %r = phi i64 [ 0, %entry ], [ %r1, %rowend ]
  %x0 = mul i64 %r, %stride
  %s0 = mul i64 %r, %blocks
  br label %block
block:
  %b = phi i64 [ 0, %row ], [ %b1, %block ]
  %k0 = mul i64 %b, {form.block}
  %k1 = add i64 %x0, %k0
  %at = getelementptr float, float* %x, i64 %k1
{loads}
{chr(10).join(tree)}
  %sum = call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0.0, {_V} {names[0]})
  %o = add i64 %s0, %b
  %to = getelementptr float, float* %sums, i64 %o
  store float %sum, float* %to
  %b1 = add i64 %b, 1
  %bc = icmp ult i64 %b1, %blocks
  br i1 %bc, label %block, label %rowend
rowend:
  %r1 = add i64 %r, 1
  %rc = icmp ult i64 %r1, %rows
  br i1 %rc, label %row, label %done
done:
  ret void
}}
"""


def _group(form: Form, rows: int) -> str:
    """One group of 16 matrix rows with ``rows`` rows of x: a loop over blocks around a loop over columns."""
    chains = 2 if rows <= 2 else 1  # a sum waits four cycles for the one before it
    sums = [f"s{m}_{h}_{c}" for m in range(rows) for h in (0, 1) for c in range(chains)]
    outs = [f"o{m}_{h}" for m in range(rows) for h in (0, 1)]
    block_phis = "\n".join(f"  %{o} = phi {_V} [ zeroinitializer, %entry ], [ %{o}_n, %end ]" for o in outs)
    column_phis = "\n".join(f"  %{s} = phi {_V} [ zeroinitializer, %block ], [ %{s}_n, %column ]" for s in sums)
    return f"""
define internal void @group{rows}(i8* %w, float* %x, float* %y, float* %sums, i64 %blocks, i64 %stride, i64 %out) {{
entry:
{_pointers("x", rows, "%stride")}
{_pointers("sums", rows, "%blocks")}
{_pointers("y", rows, "%out")}
  br label %block
block:
  %b = phi i64 [ 0, %entry ], [ %b1, %end ]
{block_phis}
  %tile0 = mul i64 %b, {form.tile_bytes}
  %tile = getelementptr i8, i8* %w, i64 %tile0
  %k0 = mul i64 %b, {form.block}
  br label %column
column:
  %k = phi i64 [ 0, %block ], [ %k_n, %column ]
{column_phis}
{chr(10).join(_column(form, rows, chains))}
  %k_n = add i64 %k, {chains}
  %kc = icmp ult i64 %k_n, {form.block}
  br i1 %kc, label %column, label %end
end:
{chr(10).join(_block_end(form, rows, chains))}
  %b1 = add i64 %b, 1
  %bc = icmp ult i64 %b1, %blocks
  br i1 %bc, label %block, label %done
done:
{chr(10).join(_stores(rows))}
  ret void
}}
"""


def _pointers(name: str, rows: int, stride: str) -> str:
    lines = []
    for m in range(rows):
        lines += [f"  %{name}{m}_i = mul i64 {stride}, {m}",
                  f"  %{name}{m} = getelementptr float, float* %{name}, i64 %{name}{m}_i"]  # fmt: skip
    return "\n".join(lines)


def _column(form: Form, rows: int, chains: int) -> Iterator[str]:
    """``chains`` columns: their 16 codes each as two vectors of float32, times each row's x."""
    for c in range(chains):
        yield f"  %kk{c} = add i64 %k, {c}"
        yield f"  %kb{c} = mul i64 %kk{c}, {form.column_bytes}"
        yield f"  %kc{c}0 = add i64 %kb{c}, {form.codes_at}"
        yield f"  %cp{c} = getelementptr i8, i8* %tile, i64 %kc{c}0"
        yield from _widen(form, c)
        yield f"  %xk{c} = add i64 %k0, %kk{c}"
        for m in range(rows):
            yield f"  %xp{c}_{m} = getelementptr float, float* %x{m}, i64 %xk{c}"
            yield f"  %xs{c}_{m} = load float, float* %xp{c}_{m}"
            yield f"  %xi{c}_{m} = insertelement {_V} undef, float %xs{c}_{m}, i32 0"
            yield f"  %xv{c}_{m} = shufflevector {_V} %xi{c}_{m}, {_V} undef, <8 x i32> zeroinitializer"
            for h in (0, 1):
                s = f"%s{m}_{h}_{c}"
                yield f"  {s}_n = call {_V} @llvm.fma.v8f32({_V} %f{c}_{h}, {_V} %xv{c}_{m}, {_V} {s})"


def _widen(form: Form, c: int) -> Iterator[str]:
    """The 16 codes at ``%cp{c}`` as float32: the lower rows' in ``%f{c}_0``, the upper ones' in ``%f{c}_1``."""
    if form.nibbles:
        yield f"  %cq{c} = bitcast i8* %cp{c} to <8 x i8>*"
        yield f"  %cv{c} = load <8 x i8>, <8 x i8>* %cq{c}, align 1"
        yield f"  %z{c} = zext <8 x i8> %cv{c} to <8 x i32>"
        yield f"  %z{c}_0 = and <8 x i32> %z{c}, <{', '.join(['i32 15'] * 8)}>"
        yield f"  %z{c}_1 = lshr <8 x i32> %z{c}, <{', '.join(['i32 4'] * 8)}>"
    else:
        for h in (0, 1):
            yield f"  %ca{c}_{h} = getelementptr i8, i8* %cp{c}, i64 {HALF_LANES * h}"
            yield f"  %cq{c}_{h} = bitcast i8* %ca{c}_{h} to <8 x i8>*"
            yield f"  %cv{c}_{h} = load <8 x i8>, <8 x i8>* %cq{c}_{h}, align 1"
            yield f"  %z{c}_{h} = sext <8 x i8> %cv{c}_{h} to <8 x i32>"
    for h in (0, 1):
        yield f"  %f{c}_{h} = sitofp <8 x i32> %z{c}_{h} to {_V}"


def _block_end(form: Form, rows: int, chains: int) -> Iterator[str]:
    """Scales, and offsets times the block's sum of x, into the running results."""
    for h in (0, 1):
        yield from _head("d", h, form, 0)
        if form.offsets:
            yield from _head("m", h, form, TILE_ROWS * form.scale_bytes)
    for m in range(rows):
        if form.offsets:
            yield f"  %sp{m} = getelementptr float, float* %sums{m}, i64 %b"
            yield f"  %ss{m} = load float, float* %sp{m}"
            yield f"  %si{m} = insertelement {_V} undef, float %ss{m}, i32 0"
            yield f"  %sv{m} = shufflevector {_V} %si{m}, {_V} undef, <8 x i32> zeroinitializer"
        for h in (0, 1):
            total = f"%s{m}_{h}_0_n"
            if chains == 2:
                yield f"  %q{m}_{h} = fadd {_V} %s{m}_{h}_0_n, %s{m}_{h}_1_n"
                total = f"%q{m}_{h}"
            before = f"%o{m}_{h}"
            if form.offsets:
                yield f"  %u{m}_{h} = call {_V} @llvm.fma.v8f32({_V} %m{h}, {_V} %sv{m}, {_V} %o{m}_{h})"
                before = f"%u{m}_{h}"
            yield f"  %o{m}_{h}_n = call {_V} @llvm.fma.v8f32({_V} %d{h}, {_V} {total}, {_V} {before})"


def _head(name: str, half: int, form: Form, at: int) -> Sequence[str]:
    """Eight scales or offsets of the tile, those of its lower or upper rows, as float32."""
    n, kind = f"{name}{half}", _V if form.wide else _H
    lines = (
        f"  %{n}_p = getelementptr i8, i8* %tile, i64 {at + HALF_LANES * half * form.scale_bytes}",
        f"  %{n}_q = bitcast i8* %{n}_p to {kind}*",
    )
    if form.wide:
        return (*lines, f"  %{n} = load {_V}, {_V}* %{n}_q, align 4")
    return (*lines, f"  %{n}_h = load {_H}, {_H}* %{n}_q, align 2", f"  %{n} = fpext {_H} %{n}_h to {_V}")


def _stores(rows: int) -> Iterator[str]:
    for m in range(rows):
        for h in (0, 1):
            yield f"  %yp{m}_{h} = getelementptr float, float* %y{m}, i64 {8 * h}"
            yield f"  %yq{m}_{h} = bitcast float* %yp{m}_{h} to {_V}*"
            yield f"  store {_V} %o{m}_{h}_n, {_V}* %yq{m}_{h}, align 4"


def _share(form: Form) -> str:
    """One thread's groups, each with all rows of x while its bytes are in the nearest cache."""
    names = ("w", "x", "y", "sums", "groups", "blocks", "rows", "stride")
    unpack = "\n".join(f"  %{n} = extractvalue %Job %job, {i}" for i, n in enumerate(names))
    cases = " ".join(f"i64 {m}, label %take{m}" for m in range(1, WIDEST + 1))
    given = "i8* %wg, float* %xr, float* %yr, float* %sr, i64 %blocks, i64 %stride, i64 %out"
    calls = "\n".join(f"take{m}:\n  call void @group{m}({given})\n  br label %taken" for m in range(1, WIDEST + 1))
    return f"""
define internal void @share(i8* %raw) {{
entry:
  %at = bitcast i8* %raw to %Job*
  %job = load %Job, %Job* %at
{unpack}
  %tid32 = call i32 @omp_get_thread_num()
  %n32 = call i32 @omp_get_num_threads()
  %tid = zext i32 %tid32 to i64
  %n = zext i32 %n32 to i64
  %tid1 = add i64 %tid, 1
  %lo0 = mul i64 %groups, %tid
  %lo = udiv i64 %lo0, %n
  %hi0 = mul i64 %groups, %tid1
  %hi = udiv i64 %hi0, %n
  %out = mul i64 %groups, {TILE_ROWS}
  %group_bytes = mul i64 %blocks, {form.tile_bytes}
  %any = icmp ult i64 %lo, %hi
  br i1 %any, label %group, label %done
group:
  %g = phi i64 [ %lo, %entry ], [ %g1, %next ]
  %w0 = mul i64 %g, %group_bytes
  %wg = getelementptr i8, i8* %w, i64 %w0
  %y0 = mul i64 %g, {TILE_ROWS}
  br label %rest
rest:
  %r = phi i64 [ 0, %group ], [ %r1, %taken ]
  %left = sub i64 %rows, %r
  %some = icmp ugt i64 %left, 0
  br i1 %some, label %take, label %next
take:
  %xo = mul i64 %r, %stride
  %xr = getelementptr float, float* %x, i64 %xo
  %so = mul i64 %r, %blocks
  %sr = getelementptr float, float* %sums, i64 %so
  %yo0 = mul i64 %r, %out
  %yo = add i64 %yo0, %y0
  %yr = getelementptr float, float* %y, i64 %yo
  %p0 = add i64 %left, {WIDEST - 1}
  %parts = udiv i64 %p0, {WIDEST}
  %t0 = add i64 %left, %parts
  %t1 = sub i64 %t0, 1
  %size = udiv i64 %t1, %parts
  switch i64 %size, label %none [ {cases} ]
none:
  unreachable
{calls}
taken:
  %r1 = add i64 %r, %size
  br label %rest
next:
  %g1 = add i64 %g, 1
  %gc = icmp ult i64 %g1, %hi
  br i1 %gc, label %group, label %done
done:
  ret void
}}
"""
