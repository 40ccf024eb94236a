"""Instructions for bytes and bfloat16: dot products and the tiles of AMX, which compute what loops do."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import pytest
import tvm
from helpers.exports import make_model, tensor
from helpers.programs import TOLERANCE, assert_same, program_of, programs_of
from onnx import TensorProto, helper
from tvm.driver import build

from ansor_mlflow.codegen import DOT_PRODUCTS, MATRIX_TILES, TILE_ROWS, tir_pipeline
from ansor_mlflow.device import cpu, has_matrix_tiles
from ansor_mlflow.device.targets import resolve_target
from ansor_mlflow.lowering import lower
from ansor_mlflow.settings import LoweringSettings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tvm.ir import IRModule
    from tvm.target import Target

    from ansor_mlflow.sketches import Programs


NEOVERSE = "llvm -mtriple=aarch64-linux-gnu -mcpu=neoverse-v1"


def byte_product(rows: int, terms: int, columns: int) -> IRModule:
    """The product of matrices of unsigned and signed bytes, scaled."""
    from tvm import te

    data, weight = te.placeholder((rows, terms), "uint8", "data"), te.placeholder((terms, columns), "int8", "weight")
    scale, k = te.placeholder((columns,), "float32", "scale"), te.reduce_axis((0, terms), "k")
    total = te.compute(
        (rows, columns),
        lambda i, j: te.sum(data[i, k].astype("int32") * weight[k, j].astype("int32"), axis=k),
        "product",
    )
    scaled = te.compute((rows, columns), lambda i, j: total[i, j].astype("float32") * scale[j], "scaled")
    function = te.create_prim_func([data, weight, scale, scaled])
    return tvm.IRModule({"main": function.with_attrs({"layout_free_buffers": [1], "global_symbol": "main"})})


def product_of_bfloat16(rows: int, terms: int, columns: int) -> IRModule:
    """The product of matrices of bfloat16, of which the second is a constant, rounded to bfloat16."""
    from tvm import te

    data, weight = (te.placeholder(shape, "bfloat16", "x") for shape in ((rows, terms), (terms, columns)))
    k = te.reduce_axis((0, terms), "k")
    total = te.compute(
        (rows, columns),
        lambda i, j: te.sum(data[i, k].astype("float32") * weight[k, j].astype("float32"), axis=k),
        "product",
    )
    rounded = te.compute((rows, columns), lambda i, j: total[i, j].astype("bfloat16"), "rounded")
    function = te.create_prim_func([data, weight, rounded])
    return tvm.IRModule({"main": function.with_attrs({"layout_free_buffers": [1], "global_symbol": "main"})})


def assert_tiles_are_right(mod: IRModule, programs: Programs, target: Target, tolerance: float = TOLERANCE) -> None:
    """A few programs compute what a task does, also on a CPU without the instruction, where they are plain loops."""
    for tile in programs.tiles[:: max(1, len(programs.tiles) // 3)]:
        program = program_of(programs, tile)
        assert programs.tile_of(program) == tile
        for each in (target, resolve_target("llvm -mcpu=x86-64", 2)):
            assert_same(mod, program.mod, each, tolerance=tolerance)


@pytest.mark.parametrize(("rows", "terms", "columns"), [(13, 64, 48), (1, 36, 96), (40, 32, 8), (9, 512, 4)])
def test_sums_of_bytes_are_added_four_at_a_time(rows: int, terms: int, columns: int, host_target: Target) -> None:
    """On a CPU without that instruction the same programs are plain loops."""
    mod, target = byte_product(rows, terms, columns), resolve_target("llvm -mcpu=znver4", 2)
    programs = programs_of(mod, target)
    assert programs.first_decision.startswith("integer tile")
    assert_tiles_are_right(mod, programs, host_target)


@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize(("data", "weight"), [(255, 64), (255, -64), (0, 64)])
def test_the_largest_bytes_and_weights_of_7_bits_are_exact(
    data: int, weight: int, lanes: int, host_target: Target
) -> None:
    mod = byte_product(6, 64, lanes)
    programs = programs_of(mod, resolve_target("llvm -mcpu=haswell", 2))
    assert programs.first_decision.startswith("integer tile")
    arrays = [np.full((6, 64), data, np.uint8), np.full((64, lanes), weight, np.int8), np.ones(lanes, np.float32)]
    assert_same(mod, program_of(programs, programs.tiles[0]).mod, host_target, tolerance=0, arrays=arrays)


def test_a_wider_loop_than_the_cpus_vectors_stays_a_loop() -> None:
    """LLVM would end the process."""
    for spec, has_it in (("haswell", False), ("sierraforest", False), ("znver4", True)):
        mod = byte_product(5, 64, 64)
        programs = programs_of(mod, resolve_target("llvm -mcpu=znver4", 1))
        tile = next(tile for tile in programs.tiles if tile.lanes == TILE_ROWS)
        target = resolve_target(f"llvm -mcpu={spec}", 1)
        library = build(program_of(programs, tile).mod, target=target, pipeline=tir_pipeline(target))
        assert ("vpdpbusd.512" in library.inspect_source("ll")) == has_it


@pytest.mark.parametrize(("rows", "terms", "columns"), [(13, 64, 48), (1, 34, 96), (40, 32, 8), (9, 512, 4)])
def test_sums_of_bfloat16_are_added_two_at_a_time(rows: int, terms: int, columns: int, host_target: Target) -> None:
    """On a CPU without that instruction the same programs are plain loops."""
    mod = product_of_bfloat16(rows, terms, columns)
    programs = programs_of(mod, resolve_target("llvm -mcpu=znver4", 2))
    assert programs.first_decision.startswith("pair tile")
    assert_tiles_are_right(mod, programs, host_target, tolerance=2**-8)


@pytest.mark.parametrize(
    ("spec", "make_product", "instruction", "register"),
    [
        ("llvm -mcpu=znver4", byte_product, "vpdpbusd", "%zmm"),
        ("llvm -mcpu=sierraforest", byte_product, "vpdpbusd", "%ymm"),
        ("llvm -mcpu=haswell", byte_product, "vpmaddubsw", "%ymm"),
        ("llvm -mcpu=skylake-avx512", byte_product, "vpmaddubsw", "%zmm"),
        (NEOVERSE, byte_product, "usdot", ".16b"),
        ("llvm -mcpu=znver4", product_of_bfloat16, "vdpbf16ps", "%zmm"),
        (NEOVERSE, product_of_bfloat16, "bfdot", ".8h"),
    ],
)
def test_an_instruction_keeps_its_sums_in_registers(
    spec: str, make_product: Callable[[int, int, int], IRModule], instruction: str, register: str
) -> None:
    target = resolve_target(spec, 1)
    programs = programs_of(make_product(26, 64, 64), target)
    library = build(program_of(programs, programs.tiles[0]).mod, target=target, pipeline=tir_pipeline(target))
    lines = [line for line in library.inspect_source("asm").splitlines() if instruction in line]
    assert len(lines) >= programs.tiles[0].vectors * programs.tiles[0].columns
    assert all(register in line and "rsp" not in line for line in lines)


def test_another_loop_that_a_record_annotates_stays_a_loop() -> None:
    """The instruction would read what is no pack of bytes."""
    from tvm.s_tir import Schedule

    target = resolve_target("llvm -mcpu=znver4", 1)
    for columns, split, place in ((16, 4, -3), (64, 4, -3), (64, 4, -2), (64, 8, -3)):
        mod = byte_product(5, 64, columns)
        sch = Schedule(mod)
        block = sch.get_sblock("product")
        row, column, term = sch.get_loops(block)
        loops = [row, *sch.split(column, [None, 16]), *sch.split(term, [None, split])]
        sch.annotate(loops[place], DOT_PRODUCTS, 1)
        library = build(sch.mod, target=target, pipeline=tir_pipeline(target))
        assert "vpdpbusd" not in library.inspect_source("ll")  # LLVM may choose it for a loop by itself


@pytest.mark.parametrize(("least", "most", "are_one"), [(-128.0, 127.0, True), (0.0, 255.0, True), (0.5, 99.5, False)])
@pytest.mark.parametrize("lanes", [1, 8])
def test_bytes_are_rounded_as_they_are_converted(
    least: float, most: float, are_one: bool, lanes: int, host_target: Target
) -> None:
    """One instruction does both, ties to even, where it makes no difference whether the limits come before it."""
    from tvm import te, tirx
    from tvm.s_tir import Schedule

    dtype, limits = "int8" if least < 0 else "uint8", [tirx.const(limit, "float32") for limit in (least, most)]
    x = te.placeholder((24,), "float32", "x")
    limited = te.compute((24,), lambda i: tirx.min(tirx.max(tirx.nearbyint(x[i]), limits[0]), limits[1]), "limited")
    y = te.compute((24,), lambda i: limited[i].astype(dtype), "y")
    sch = Schedule(tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")}))
    sch.compute_inline(sch.get_sblock("limited"))
    if lanes > 1:
        sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, lanes])[1])
    library = build(sch.mod, target=host_target, pipeline=tir_pipeline(host_target))
    assert ("llvm.lrint" in library.inspect_source("ll")) == are_one
    values = np.float32([*np.arange(-4, 12) / 2, 126.5, 127.5, 254.5, 255.5, 3e38, -3e38, np.inf, -np.inf])
    found = tvm.runtime.tensor(np.zeros(24, dtype))
    library["main"](tvm.runtime.tensor(values), found)
    np.testing.assert_array_equal(found.numpy(), np.clip(np.rint(values), least, most).astype(dtype))


def test_a_copy_of_what_was_computed_in_bfloat16_is_right(host_target: Target) -> None:
    """Only what is copied from outside of the function has bits; the rest are floats until it is written."""
    from tvm import te, tirx, topi

    x, zero = te.placeholder((8,), "bfloat16", "x"), tirx.const(0, "bfloat16")
    relu = te.compute((8,), lambda i: tirx.max(x[i], zero), "relu")
    padded = topi.nn.pad(topi.nn.pad(relu, [1], [1], zero), [2], [2], zero)
    y = te.compute((14,), lambda i: padded[13 - i], "y")
    mod = tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")})
    values, found = np.linspace(-2, 2, 8).astype(ml_dtypes.bfloat16), np.zeros(14, ml_dtypes.bfloat16)
    result = tvm.runtime.tensor(found)
    build(mod, target=host_target, pipeline=tir_pipeline(host_target))["main"](tvm.runtime.tensor(values), result)
    expected = np.pad(np.maximum(values.astype(np.float32), 0), 3)[::-1]
    np.testing.assert_array_equal(result.numpy().astype(np.float32), expected)


AMX = "llvm -mcpu=sapphirerapids"


def byte_convolution(size: int, channels: int, kernel: int, stride: int, outputs: int) -> IRModule:
    """The task of a ConvInteger on an image, padded with its zero point: what is lowered for AMX."""
    rng = np.random.default_rng(0)
    weights = rng.integers(-128, 127, (outputs, channels, kernel, kernel), np.int8)
    pads = [kernel // 2] * 4
    nodes = [
        helper.make_node("ConvInteger", ["x", "w", "z"], ["sums"], pads=pads, strides=[stride] * 2),
        helper.make_node("Cast", ["sums"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["floats", "s"], ["y"]),
    ]
    constants = {
        "w": weights,
        "z": np.array(117, np.uint8),
        "s": rng.random((outputs, 1, 1), np.float32),
    }
    side = (size + 2 * (kernel // 2) - kernel) // stride + 1
    data = tensor("x", (1, channels, size, size), TensorProto.UINT8)
    model = make_model(nodes, [data], [tensor("y", (1, outputs, side, side))], constants)
    return max(lower(model, resolve_target(AMX, 2)).tasks, key=lambda task: task.info.flops).mod


@pytest.mark.parametrize(("rows", "terms", "columns"), [(64, 128, 64), (50, 96, 48), (197, 64, 32), (13, 128, 96)])
def test_products_in_tiles_are_right(rows: int, terms: int, columns: int, host_target: Target) -> None:
    """Also those of rows that no tile divides; on a CPU without AMX the same programs are plain loops."""
    mod, target = byte_product(rows, terms, columns), resolve_target(AMX, 2)
    programs = programs_of(mod, target)
    assert programs.first_decision.startswith("matrix tile")
    assert_tiles_are_right(mod, programs, host_target)


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "stride", "outputs"),
    [
        (14, 64, 3, 1, 32),
        (14, 64, 3, 2, 48),
        (7, 96, 1, 1, 64),
        (28, 32, 3, 1, 16),
        (32, 4, 7, 2, 32),
        (9, 4, 8, 1, 16),
    ],
)
def test_convolutions_in_tiles_are_right(
    size: int, channels: int, kernel: int, stride: int, outputs: int, host_target: Target
) -> None:
    mod, target = byte_convolution(size, channels, kernel, stride, outputs), resolve_target(AMX, 2)
    programs = programs_of(mod, target)
    assert programs.first_decision.startswith("matrix tile")
    for tile in programs.tiles[:: max(1, len(programs.tiles) // 3)]:
        assert_same(mod, program_of(programs, tile).mod, host_target)


def test_tiles_are_configured_once_for_a_job_and_keep_their_sums() -> None:
    target = resolve_target(AMX, 2)
    programs = programs_of(byte_product(128, 256, 256), target)
    tile = programs.tiles[0]
    library = build(program_of(programs, tile).mod, target=target, pipeline=tir_pipeline(target))
    code = library.inspect_source("ll")
    calls = {name: code.count(f"call void @llvm.x86.{name}(") for name in ("ldtilecfg", "tilerelease", "tilezero")}
    num_sums = tile.vectors * tile.rows * -(-tile.columns // TILE_ROWS)
    assert 128 % tile.columns == 0
    assert (calls["ldtilecfg"], calls["tilerelease"], calls["tilezero"]) == (1, 1, num_sums)
    assert "@syscall" in code
    loop = code[code.index("call void @llvm.x86.tdpbusd(") :]
    assert "tilestored" not in loop[: loop.rindex("call void @llvm.x86.tdpbusd(")], "sums stay in tiles"


@pytest.mark.parametrize(("rows", "num_passes"), [(128, 4), (32, 1)])
def test_each_pass_over_a_panel_fetches_a_share_of_the_next(rows: int, num_passes: int) -> None:
    target = resolve_target(AMX, 2)
    programs = programs_of(byte_product(rows, 256, 256), target)
    tile = next(
        tile for tile in programs.tiles if (tile.column_tiles * tile.vectors, tile.columns) == (2 * num_passes, 32)
    )
    code = build(program_of(programs, tile).mod, target=target, pipeline=tir_pipeline(target)).inspect_source("ll")
    num_steps = code.count("call void @llvm.x86.tdpbusd(") // 4  # LLVM may write them out
    num_lines = num_steps * 2 * TILE_ROWS  # of weights, which are two tiles in each step
    assert code.count("call void @llvm.prefetch") == (num_lines // num_passes if num_passes > 1 else 0)


@pytest.mark.parametrize(("rows", "terms"), [(1, 128), (4, 128), (64, 16)])
def test_what_tiles_are_too_large_for_has_vectors(rows: int, terms: int) -> None:
    programs = programs_of(byte_product(rows, terms, 64), resolve_target(AMX, 2))
    assert programs.first_decision.startswith("integer tile")


def test_another_loop_that_a_record_makes_a_product_of_tiles_stays_a_loop() -> None:
    """It would be read as what it is not: too many rows for a tile, vectors of another length, floats."""
    from tvm.s_tir import Schedule

    target = resolve_target(AMX, 1)
    for rows, lanes, packs in ((17, 16, 16), (16, 8, 16), (16, 16, 32), (160, 16, 16)):
        sch = Schedule(byte_product(rows, 128, 64))
        row, column, term = sch.get_loops(sch.get_sblock("product"))
        outer, lane = sch.split(column, [None, lanes])
        terms = sch.split(term, [None, packs, 4])
        sch.reorder(outer, *terms[:2], row, lane, terms[2])
        sch.annotate(terms[0], MATRIX_TILES, 1)
        library = build(sch.mod, target=target, pipeline=tir_pipeline(target))
        assert "tdpbusd" not in library.inspect_source("ll")


def convolution_of_bfloat16(
    target: Target, size: int, channels: int, kernel: int, stride: int, outputs: int
) -> IRModule:
    """The task of a padded Conv that computes in bfloat16."""
    weights = np.random.default_rng(0).normal(size=(outputs, channels, kernel, kernel)).astype(np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[kernel // 2] * 4, strides=[stride] * 2)
    side = (size + 2 * (kernel // 2) - kernel) // stride + 1
    shapes = (1, channels, size, size), (1, outputs, side, side)
    model = make_model([node], [tensor("x", shapes[0])], [tensor("y", shapes[1])], {"w": weights})
    tasks = lower(model, target, LoweringSettings(dtype="bfloat16", algorithm="direct")).tasks
    return max(tasks, key=lambda task: task.info.flops).mod


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "stride", "outputs"),
    [(14, 64, 3, 1, 32), (14, 32, 3, 2, 48), (7, 96, 1, 1, 64), (32, 3, 7, 2, 32), (9, 3, 8, 1, 16)],
)
@pytest.mark.parametrize(
    ("spec", "sketch", "instruction"),
    [(AMX, "matrix tile", "tdpbf16ps"), ("llvm -mcpu=znver4", "pair tile", "vdpbf16ps")],
)
def test_convolutions_of_bfloat16_are_right(
    spec: str,
    sketch: str,
    instruction: str,
    size: int,
    channels: int,
    kernel: int,
    stride: int,
    outputs: int,
    host_target: Target,
) -> None:
    """Also that of an image, whose channels become even; padded copies have 16 bits."""
    target = resolve_target(spec, 2)
    mod = convolution_of_bfloat16(target, size, channels, kernel, stride, outputs)
    programs = programs_of(mod, target)
    assert programs.first_decision.startswith(sketch)
    assert_tiles_are_right(mod, programs, host_target, tolerance=2**-8)  # a step of it
    library = build(program_of(programs, programs.tiles[0]).mod, target=target, pipeline=tir_pipeline(target))
    assert library.inspect_source("asm").count(instruction) >= programs.tiles[0].vectors * programs.tiles[0].rows


def test_computed_products_of_bfloat16_have_vectors() -> None:
    """Only constants can be packed for tiles; an attention has none."""
    from tvm import te

    a, b = (te.placeholder((64, 64), "bfloat16", name) for name in "ab")
    k = te.reduce_axis((0, 64), "k")
    total = te.compute(
        (64, 64), lambda i, j: te.sum(a[i, k].astype("float32") * b[k, j].astype("float32"), axis=k), "product"
    )
    mod = tvm.IRModule({"main": te.create_prim_func([a, b, total]).with_attr("global_symbol", "main")})
    assert programs_of(mod, resolve_target(AMX, 2)).first_decision.startswith("register tile")


@pytest.mark.parametrize("lanes", [1, 8, 16])
@pytest.mark.parametrize("cpu_name", ["", "x86-64"])
def test_floats_are_rounded_to_bfloat16(lanes: int, cpu_name: str, host_target: Target) -> None:
    """Ties to even, in an instruction where there is one."""
    from tvm import te
    from tvm.s_tir import Schedule

    x = te.placeholder((32,), "float32", "x")
    y = te.compute((32,), lambda i: x[i].astype("bfloat16"), "y")
    sch = Schedule(tvm.IRModule({"main": te.create_prim_func([x, y]).with_attr("global_symbol", "main")}))
    if lanes > 1:
        sch.vectorize(sch.split(sch.get_loops(sch.get_sblock("y"))[0], [None, lanes])[1])
    amx, target = resolve_target(AMX, 1), resolve_target(f"llvm -mcpu={cpu_name}", 1) if cpu_name else host_target
    code = build(sch.mod, target=amx, pipeline=tir_pipeline(amx)).inspect_source("asm")
    assert ("vcvtneps2bf16" in code) == (lanes > 1)
    steps = 1 + np.arange(16, dtype=np.float32) / 512  # half of bfloat16's steps, of which every other one is a tie
    values = np.float32([*steps, *-steps[:8], 0.0, -0.0, 3.3e38, np.inf, -np.inf, np.nan, 1e-30, 2.0**-126])
    found = tvm.runtime.tensor(np.zeros(32, ml_dtypes.bfloat16))
    build(sch.mod, target=target, pipeline=tir_pipeline(target))["main"](tvm.runtime.tensor(values), found)
    np.testing.assert_array_equal(
        found.numpy().astype(np.float32), values.astype(ml_dtypes.bfloat16).astype(np.float32)
    )


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_host_has_tiles_where_linux_grants_them(is_granted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever LLVM thinks of a CPU of that name."""
    monkeypatch.setattr(cpu, "_may_use_tiles", lambda: is_granted)
    assert has_matrix_tiles(tvm.target.Target(cpu.host_attributes())) == is_granted
