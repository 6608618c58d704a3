"""Tokenizer, chat template and generation defaults of a checkpoint, for a process that needs nothing else.

A folder goes through AutoTokenizer, which imports torch, unless it names the class that is behind everything in
tokenizer.json: then through that one, which does not. A GGUF file's vocabulary is converted by transformers once, which
takes seconds, and then comes from the user's cache without torch being imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from deepinfer.stages.model.config_hf import eos_token_ids
from deepinfer.stages.model.errors import CheckpointError, ModelError, ModelNotFoundError
from deepinfer.stages.model.folder_names import CONFIG
from deepinfer.stages.model.json_fields import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
_GENERIC_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")
_SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class ChatTemplateError(ModelError):
    """There is no chat template, or the template refuses these messages. The text says which."""


class TokenizerFacts(NamedTuple):
    """What a checkpoint says beside its vocabulary."""

    eos_token_ids: tuple[int, ...]
    generation_defaults: dict[str, float]
    valid_ids: int | None = None
    """None: as many as the tokenizer itself knows."""


class Tokenizer:
    """Special tokens that are written out inside a text or a chat message are parsed as such, as
    transformers does: whoever builds messages from untrusted text has to strip them.
    """

    def __init__(self, inner: PreTrainedTokenizerBase, facts: TokenizerFacts):
        self._inner = inner
        self._bare_decode = _bare_decode(inner)
        known = max(inner.get_vocab().values()) + 1
        self.vocab_size: int = known if facts.valid_ids is None else min(known, facts.valid_ids)
        """Valid ids are 0 to vocab_size - 1; the model may have more rows, as padding."""
        own = () if inner.eos_token_id is None else (int(inner.eos_token_id),)
        self.eos_token_ids: tuple[int, ...] = facts.eos_token_ids or own
        self.generation_defaults: dict[str, float] = facts.generation_defaults
        """Sampling fields of generation_config.json; empty when it asks for greedy decoding."""

    def vocabulary(self) -> dict[str, int]:
        """Token to id."""
        return self._inner.get_vocab()

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    def save(self, folder: Path) -> None:
        """As files of a Hugging Face folder, the chat template too."""
        self._inner.save_pretrained(str(folder))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """`add_special` adds what the checkpoint puts around a text, such as a begin token."""
        return self._inner.encode(text, add_special_tokens=add_special, verbose=False)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Incomplete UTF-8 comes out as U+FFFD. No spaces are cleaned up."""
        if self._bare_decode is not None:
            return self._bare_decode(list(ids), skip_special)
        text = self._inner.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
        return cast(str, text)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt for the assistant's next turn. Raises ChatTemplateError."""
        from jinja2.exceptions import TemplateError

        if not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template; send a text or token ids instead")
        if not messages:
            raise ChatTemplateError("a chat needs at least one message")
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages], add_generation_prompt=True, tokenize=False
            )
        except (TemplateError, TypeError) as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from error
        return cast(str, text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """render_chat as token ids; the template has written its begin token itself."""
        return self.encode(self.render_chat(messages), add_special=False)


def _bare_decode(inner: PreTrainedTokenizerBase) -> Callable[[list[int], bool], str] | None:
    """That of the library beneath, where all that transformers adds is checks of every id, which take longer than a
    short decode. None where the class has a decode of its own."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(inner)
    if not isinstance(inner, PreTrainedTokenizerFast):
        return None
    if kind.decode is not PreTrainedTokenizerBase.decode or kind._decode is not PreTrainedTokenizerFast._decode:
        return None
    return cast("Callable[[list[int], bool], str]", inner.backend_tokenizer.decode)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Of a folder or a GGUF file. Raises ModelNotFoundError or CheckpointError naming the file."""
    path = Path(path)
    if path.is_dir():
        return Tokenizer(_from_folder(path), _folder_facts(path))
    if not path.is_file():
        raise ModelNotFoundError(f"{path} does not exist; expected a Hugging Face folder or a GGUF file")
    from deepinfer.stages.model import tokenizer_gguf

    inner, facts = tokenizer_gguf.load(path)
    return Tokenizer(inner, facts)


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    if not any((folder / name).exists() for name in _VOCABULARIES):
        raise CheckpointError(f"{folder} holds no tokenizer: none of {', '.join(_VOCABULARIES)}")
    try:
        if _is_generic(folder):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def _is_generic(folder: Path) -> bool:
    """Whether AutoTokenizer would take the generic class too."""
    settings = folder / "tokenizer_config.json"
    if not (folder / "tokenizer.json").exists() or not settings.exists():
        return False
    named = read_json(settings)
    return named.get("tokenizer_class") in _GENERIC_CLASSES and "auto_map" not in named


def _folder_facts(folder: Path) -> TokenizerFacts:
    generation_file = folder / "generation_config.json"
    generation = read_json(generation_file) if generation_file.exists() else {}
    ends = eos_token_ids(read_json(folder / CONFIG), generation, str(folder))
    return TokenizerFacts(ends, sampling_defaults(generation))


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float]:
    """As in transformers, sampling fields count only with `do_sample`; a repetition penalty always does."""
    given = {name: generation[name] for name in _SAMPLING_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample"):
        return {"temperature": 1.0, **given}
    return {name: value for name, value in given.items() if name == "repetition_penalty"}
