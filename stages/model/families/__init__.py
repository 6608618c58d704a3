"""The families of models that load: one small file each, and this table. docs/models.md shows how to add one."""

from __future__ import annotations

from deepinfer.stages.model.families.family import Family
from deepinfer.stages.model.families.gemma import GEMMA2, GEMMA3
from deepinfer.stages.model.families.llama import LLAMA
from deepinfer.stages.model.families.mistral import MISTRAL
from deepinfer.stages.model.families.olmo2 import OLMO2
from deepinfer.stages.model.families.phi3 import PHI3
from deepinfer.stages.model.families.qwen import QWEN2, QWEN3
from deepinfer.stages.model.families.smollm3 import SMOLLM3

__all__ = ["ARCHITECTURES", "FAMILIES", "Family"]

_ALL = LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, SMOLLM3, PHI3, GEMMA2, GEMMA3

FAMILIES: dict[str, Family] = {family.name: family for family in _ALL}
"""By the `model_type` of config.json."""
ARCHITECTURES: dict[str, Family] = {family.architecture: family for family in FAMILIES.values() if family.architecture}
"""By the `general.architecture` of GGUF files."""
