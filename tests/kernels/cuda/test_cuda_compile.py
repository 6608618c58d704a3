"""Every kernel that ships compiles for sm_86, with no GPU, no driver and no CUDA headers, and spills nothing."""

import itertools

import pytest
import torch
from cuda_harness import FORMATS

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.cuda import disk_cache, nvrtc
from deepinfer.kernels.cuda.decode_plan import BLOCK_SIZES, HEAD_DIMS, MAX_GROUP, DecodePlan
from deepinfer.kernels.cuda.source import KernelSource

GROUPS = (1, 2, 3, 4, 7, 8, 12, 16)
REGISTERS_OF_THREE_CTAS, REGISTERS_OF_TWO = 168, 255


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def plan(fmt="fp16", head_dim=64, group=1, block_size=16, key_bias=False):
    pair = resolve_kv_format(fmt)
    return DecodePlan(pair.k, pair.v, head_dim, group, block_size, key_bias)


def check(source, registers):
    compiled = nvrtc.compile_kernel(source)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert b".target sm_86" in compiled.ptx
    assert source.name.encode() in compiled.ptx
    used = compiled.resources
    assert (used.spill_stores, used.spill_loads, used.stack_bytes) == (0, 0, 0), f"{source}: {used}"
    assert used.registers <= registers, f"{source}: {used}"


def check_decode(shape):
    check(shape.decode_source(), REGISTERS_OF_THREE_CTAS if shape.ctas_per_sm == 3 else REGISTERS_OF_TWO)


@pytest.mark.parametrize(("index", "fmt"), list(enumerate(FORMATS)))
def test_paged_decode_compiles_without_spills_for_every_head_dim(index, fmt):
    for place, head_dim in enumerate(HEAD_DIMS):
        turn = index + place
        check_decode(plan(fmt, head_dim, GROUPS[turn % len(GROUPS)], BLOCK_SIZES[turn % len(BLOCK_SIZES)]))


@pytest.mark.parametrize(("index", "head_dim"), list(enumerate(HEAD_DIMS)))
def test_paged_decode_with_a_key_bias_compiles_without_spills(index, head_dim):
    for step, fmt in enumerate(FORMATS):
        if (index + step) % 3 == 0:
            check_decode(plan(fmt, head_dim, GROUPS[step], key_bias=True))


@pytest.mark.slow
@pytest.mark.parametrize(("fmt", "head_dim"), list(itertools.product(FORMATS, HEAD_DIMS)))
def test_paged_decode_compiles_without_spills_for_every_group(fmt, head_dim):
    for group in range(1, MAX_GROUP + 1):
        check_decode(plan(fmt, head_dim, group, BLOCK_SIZES[group % len(BLOCK_SIZES)]))
        check_decode(plan(fmt, head_dim, group, key_bias=True))


@pytest.mark.parametrize("fmt", FORMATS)
def test_kv_write_compiles_without_spills(fmt):
    for place, head_dim in enumerate(HEAD_DIMS):
        check(plan(fmt, head_dim).write_source(place % 3, bool(place % 2)), 64)


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_the_merge_compiles_without_spills(kind):
    for head_dim in HEAD_DIMS:
        check(plan("fp16", head_dim).merge_source(kind), 64)


def test_the_ptx_of_a_kernel_is_made_for_compute_86():
    compiled = nvrtc.compile_kernel(plan("e4m3").decode_source(), "compute_86")
    assert b".target sm_86" in compiled.ptx
    assert compiled.cubin == b""


def test_shared_memory_stays_within_what_every_launch_may_have():
    for fmt, head_dim, group, block_size in itertools.product(FORMATS, HEAD_DIMS, range(1, 17), BLOCK_SIZES):
        assert plan(fmt, head_dim, group, block_size, key_bias=True).shared_bytes <= 48 * 1024


def test_a_source_that_does_not_compile_shows_the_compilers_log(tmp_path, own_cache, backend):
    path = tmp_path / "broken.cu"
    path.write_text('extern "C" __global__ void KERNEL_NAME(int* out) { *out = undeclared_thing; }')
    for compile_kernel in (nvrtc.compile_kernel, backend.compile):
        with pytest.raises(nvrtc.CompileError, match="undeclared_thing"):
            compile_kernel(KernelSource(str(path), "broken"))


def test_a_compiled_kernel_is_taken_from_the_disk_until_its_source_changes(tmp_path, own_cache, monkeypatch):
    path = tmp_path / "simple.cu"
    path.write_text('extern "C" __global__ void KERNEL_NAME(int* out) { *out = 1; }')
    source = KernelSource(str(path), "simple")
    first = nvrtc.compile_kernel(source)
    calls = []
    original = nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *args: calls.append(args) or original(*args))
    assert nvrtc.compile_kernel(source) == first
    assert not calls
    path.write_text(path.read_text().replace("1", "2"))
    assert nvrtc.compile_kernel(source).cubin != first.cubin
    nvrtc.compile_kernel(source, "sm_89")
    nvrtc.compile_kernel(KernelSource(str(path), "simple", (("ANY", 1),)))
    assert len(calls) == 3


def test_a_damaged_cache_entry_is_compiled_again(own_cache):
    source = plan().merge_source(0)
    first = nvrtc.compile_kernel(source)
    (entry,) = disk_cache.cache_folder().glob("cubin-*")
    entry.write_bytes(entry.read_bytes()[:-1])
    assert nvrtc.compile_kernel(source).cubin == first.cubin


def test_the_cache_belongs_to_its_owner_alone(own_cache):
    assert disk_cache.cache_folder().stat().st_mode & 0o077 == 0


def test_the_cupy_back_end_says_in_one_line_that_there_is_no_gpu():
    from deepinfer.kernels.cuda.cupy_backend import CupyBackend

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises((ImportError, RuntimeError), match=r"cupy|no CUDA device"):
        CupyBackend()
