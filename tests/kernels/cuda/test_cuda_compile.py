"""Every kernel that ships compiles for sm_86, with no GPU, no driver and no CUDA headers, and spills nothing."""

import itertools
from dataclasses import replace

import pytest
import torch
from cuda_harness import FORMATS
from sweep import check, compile_all

from deepinfer.kernels import resolve_kv_format
from deepinfer.kernels.cuda import disk_cache, nvrtc
from deepinfer.kernels.cuda.decode_plan import BLOCK_SIZES, HEAD_DIMS, MAX_GROUP, DecodePlan
from deepinfer.kernels.cuda.prefill_plan import PrefillPlan
from deepinfer.kernels.cuda.source import KernelSource

REGISTERS_OF_THREE_CTAS, REGISTERS_OF_TWO = 168, 255
PUBLISHED = {
    64: (1, 3, 4, 7, 8),
    80: (4,),
    96: (),
    128: (1, 2, 3, 4, 5, 6, 7, 8, 12, 16),
    256: (2, 3),
}
"""By head_dim, the query heads for each KV head that published Llama, Mistral, Qwen2 and Qwen3 models have."""
PREFILL_GROUPS = (1, 2, 3, 4, 5, 7, 8, 16)
PUBLISHED_BIASED = {64: (1, 7), 128: (1, 5, 6, 7, 8)}
"""Of those with key biases: Qwen2."""


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path))


def plan(fmt="fp16", head_dim=64, group=1, block_size=16, key_bias=False):
    pair = resolve_kv_format(fmt)
    return DecodePlan(pair.k, pair.v, head_dim, group, block_size, key_bias)


def decode_plans(head_dim):
    """Published shapes with every format; every other shape that there is a kernel for with one format, and with one
    and a key bias, in turn."""
    place = HEAD_DIMS.index(head_dim)
    for group in range(1, MAX_GROUP + 1):
        block_size = BLOCK_SIZES[group % len(BLOCK_SIZES)]
        for index, fmt in enumerate(FORMATS):
            turn = (index + group + 3 * place) % len(FORMATS)
            if turn == 0 or group in PUBLISHED[head_dim]:
                yield plan(fmt, head_dim, group, block_size)
            if turn == 1 or group in PUBLISHED_BIASED.get(head_dim, ()):
                yield plan(fmt, head_dim, group, block_size, key_bias=True)


def write_sources(head_dim):
    """All formats; activations of one kind and a norm or none, in turn."""
    place = HEAD_DIMS.index(head_dim)
    return [plan(fmt, head_dim).write_source(place % 3, bool(place % 2)) for fmt in FORMATS]


def merge_sources(head_dim):
    return [plan("fp16", head_dim).merge_source(kind, prefill) for kind in range(3) for prefill in (False, True)]


def prefill_plans(head_dim):
    """Where published models are many, every format with a key bias and without, elsewhere formats in turn, and always
    bf16, which needs most. Groups, which are in addresses only, take turns, and so do soft caps."""
    place = HEAD_DIMS.index(head_dim)
    for index, fmt in enumerate(FORMATS):
        for key_bias in (False, True):
            if head_dim not in PUBLISHED_BIASED and fmt != "bf16" and (index + key_bias + place) % 4:
                continue
            group = PREFILL_GROUPS[(index + key_bias + HEAD_DIMS.index(head_dim)) % len(PREFILL_GROUPS)]
            shape = replace(plan(fmt, head_dim, group, 16, key_bias), soft_cap=bool((index + key_bias) % 2))
            yield PrefillPlan(shape)


@pytest.fixture(scope="session")
def compiled():
    """Everything that ships, each compiled once."""
    sources = []
    for head_dim in HEAD_DIMS:
        sources += [shape.decode_source() for shape in decode_plans(head_dim)]
        sources += [shape.source() for shape in prefill_plans(head_dim)]
        sources += write_sources(head_dim) + merge_sources(head_dim)
    return compile_all(sources)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_decode_compiles_without_spills(compiled, head_dim):
    seen = set()
    for shape in decode_plans(head_dim):
        source = shape.decode_source()
        check(source, compiled[source], REGISTERS_OF_THREE_CTAS if shape.ctas_per_sm == 3 else REGISTERS_OF_TWO)
        seen.add((shape.k, shape.v, shape.key_bias))
    assert len(seen) == 2 * len(FORMATS)  # each format has its turn, with a key bias and without


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_paged_prefill_compiles_without_spills(compiled, head_dim):
    for shape in prefill_plans(head_dim):
        source = shape.source()
        check(source, compiled[source], REGISTERS_OF_THREE_CTAS if shape.ctas_per_sm == 3 else REGISTERS_OF_TWO)
        assert b"mma.sync.aligned.m16n8k16" in compiled[source].ptx


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_kv_write_and_merge_compile_without_spills(compiled, head_dim):
    for source in write_sources(head_dim) + merge_sources(head_dim):
        check(source, compiled[source], 64)


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
