"""A model on disk whose headers have been read and checked: every fault that they can show is raised here,
by name, before a weight is read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from deepinfer.stages.model.config import HEAD, ModelConfig, parameter_shapes
from deepinfer.stages.model.config_gguf import config_from_gguf
from deepinfer.stages.model.config_hf import config_from_folder
from deepinfer.stages.model.errors import CheckpointError, ModelNotFoundError
from deepinfer.stages.model.gguf_source import GGUFSource, named_tensors, read_rope_divisors
from deepinfer.stages.model.gguf_split import read_model_header
from deepinfer.stages.model.precision import choose_dtype, weight_bytes
from deepinfer.stages.model.quantisation import scheme_of_folder
from deepinfer.stages.model.quantised_source import QuantisedSource
from deepinfer.stages.model.safetensors_source import SafetensorsSource
from deepinfer.stages.model.source import WeightSource


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    format: str
    """Either "safetensors" or "gguf"."""
    config: ModelConfig
    source: WeightSource

    @property
    def weight_bytes_estimate(self) -> int:
        """Bytes in memory when loaded with dtype "auto" and without bf16 copies."""
        return self.estimate_weight_bytes("auto")

    def estimate_weight_bytes(self, dtype: str, bf16_copies: bool = False, cuda_kernels: bool = False) -> int:
        return weight_bytes(self.source.headers, choose_dtype(dtype, self.source.headers), bf16_copies, cuda_kernels)

    def describe(self) -> dict[str, object]:
        """What `status` shows of the files. Until the source is closed."""
        headers = self.source.headers.values()
        return {
            "path": str(self.path),
            "format": self.format,
            "tensor_types": dict(Counter(header.dtype for header in headers).most_common()),
            "file_bytes": sum(header.nbytes for header in headers),
            **self.source.report(),
        }


def open_checkpoint(path: Path | str) -> Checkpoint:
    """A folder of Hugging Face files or one GGUF file.

    Raises ModelNotFoundError, UnsupportedModelError or CheckpointError, each naming file and tensor or field.
    """
    path = Path(path)
    if path.is_dir():
        config = config_from_folder(path)
        scheme = scheme_of_folder(path)
        source: WeightSource
        if scheme is None:
            source = SafetensorsSource(path)
        else:
            source = QuantisedSource(path, scheme, parameter_shapes(config))
        _check(path, config, source)
        return Checkpoint(path, "safetensors", config, source)
    if not path.is_file():
        raise ModelNotFoundError(f"{path} does not exist; expected a Hugging Face folder or a GGUF file")
    header = read_model_header(path)
    config = config_from_gguf(header.metadata, header.tensors.keys(), read_rope_divisors(header), str(path))
    source = GGUFSource(named_tensors(header, config.family), config)
    _check(path, config, source)
    return Checkpoint(path, "gguf", config, source)


def _check(path: Path, config: ModelConfig, source: WeightSource) -> None:
    """Every parameter is there once, in its shape, and nothing else is there."""
    expected = parameter_shapes(config)
    optional = {HEAD: (config.vocab_size, config.hidden_size)} if config.tie_word_embeddings else {}
    for name, shape in expected.items():
        header = source.headers.get(name)
        if header is None:
            raise CheckpointError(f"{path}: tensor {name} is missing{_missing_hint(name)}")
        _check_shape(path, name, header.shape, shape)
    for name, header in source.headers.items():
        if name not in expected and name not in optional:
            raise CheckpointError(f"{path}: stray tensor {name}: no parameter of this {config.family} has that name")
        if name in optional:
            _check_shape(path, name, header.shape, optional[name])


def _check_shape(path: Path, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"{path}: tensor {name} has shape {list(found)}, expected {list(expected)}")


def _missing_hint(name: str) -> str:
    return " and tie_word_embeddings is false, so the embedding may not stand in for it" if name == HEAD else ""
