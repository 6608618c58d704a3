"""Text that leaves the daemon: incremental detokenizing and stop strings."""

from deepinfer.stages.text.detokenizer import IncrementalDetokenizer, byte_fallback_ids
from deepinfer.stages.text.stops import StopMatcher

__all__ = ["IncrementalDetokenizer", "StopMatcher", "byte_fallback_ids"]
