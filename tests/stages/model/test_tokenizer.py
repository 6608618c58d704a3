"""Tokenizers answer exactly as transformers' own, GGUF ones through the cache too."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf_files import GGUFModelFile
from tiny_checkpoints import tiny_model
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from deepinfer.stages.model import CheckpointError, Tokenizer, load_tokenizer
from deepinfer.stages.model.tokenizer import ChatTemplateError, TokenizerFacts, sampling_defaults

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand\ttabs\r\n\n\nlines ",
    "def f(x):\n    return x ** 2  # 12345 67.89",
    "你好，世界。こんにちは 안녕하세요",
    "🎉👩‍👩‍👧‍👦 flags 🇨🇭 and 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u200b zero width",
    "العربية עברית हिन्दी",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|>",
    "don't can't I'll \x00 \x7f \ufffd e\u0301",
    "a" * 300,
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Where is 東京?"},
    {"role": "assistant", "content": "In Japan."},
    {"role": "user", "content": "Say <|im_end|> aloud 🎉"},
]


@pytest.fixture(scope="module")
def original(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(smollm2_path.parent), gguf_file=smollm2_path.name)


@pytest.fixture(scope="module")
def cached(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The second load: the first one fills an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPINFER_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        load_tokenizer(smollm2_path)
        return load_tokenizer(smollm2_path)


@pytest.mark.parametrize("text", TEXTS)
def test_a_gguf_tokenizer_from_the_cache_equals_the_one_of_transformers(
    text: str, cached: Tokenizer, original: PreTrainedTokenizerBase
) -> None:
    for special in (True, False):
        assert cached.encode(text, add_special=special) == original.encode(text, add_special_tokens=special)
    ids = original.encode(text)
    for skip in (True, False):
        expected = original.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert cached.decode(ids, skip_special=skip) == expected


def test_a_chat_is_rendered_and_encoded_as_transformers_does(
    cached: Tokenizer, original: PreTrainedTokenizerBase
) -> None:
    for messages in (CHAT, CHAT[1:2]):
        expected = original.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert cached.render_chat(messages) == expected
        encoded = original.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert cached.encode_chat(messages) == encoded


def test_a_tokenizer_knows_its_valid_ids_and_end_tokens(cached: Tokenizer) -> None:
    assert cached.vocab_size == 49152
    assert cached.eos_token_ids == (2,)
    assert cached.generation_defaults == {}


def test_a_folder_brings_tokenizer_end_tokens_and_sampling_defaults(
    original: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    original.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama", "eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text(
        '{"do_sample": true, "top_p": 0.9, "top_k": null, "eos_token_id": [2, 0]}'
    )
    tokenizer = load_tokenizer(tmp_path)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.eos_token_ids == (2, 0)
    assert tokenizer.generation_defaults == {"temperature": 1.0, "top_p": 0.9}


def test_sampling_defaults_count_only_when_sampling_is_asked_for() -> None:
    assert sampling_defaults({"temperature": 0.6, "repetition_penalty": 1.1}) == {"repetition_penalty": 1.1}
    assert sampling_defaults({"do_sample": True, "temperature": 0.6}) == {"temperature": 0.6}


def test_a_missing_chat_template_and_refused_messages_are_clear_errors(
    original: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    original.save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    template = tmp_path / "chat_template.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        load_tokenizer(tmp_path).render_chat(CHAT)
    with pytest.raises(ChatTemplateError, match="at least one message"):
        load_tokenizer(tmp_path).render_chat([])
    template.unlink()
    with pytest.raises(ChatTemplateError, match="no chat template"):
        load_tokenizer(tmp_path).render_chat(CHAT)


def test_a_folder_without_a_tokenizer_or_with_a_broken_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(CheckpointError, match=r"holds no tokenizer: none of tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(CheckpointError, match="the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_gguf_file_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    file = GGUFModelFile(tmp_path / "m.gguf", tiny_model("llama"), "llama")
    del file.writer.kv_data[0]["tokenizer.ggml.tokens"]
    with pytest.raises(CheckpointError, match="holds no tokenizer"):
        load_tokenizer(file.write())


def test_padding_entries_at_the_end_of_a_vocabulary_are_no_valid_ids(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, cached: Tokenizer
) -> None:
    from deepinfer.stages.model import tokenizer_gguf
    from deepinfer.stages.model.gguf_header import GGUFHeader

    def valid(types: list[int]) -> int | None:
        return tokenizer_gguf._valid_ids(GGUFHeader({"tokenizer.ggml.token_type": types}, {}, 0))

    assert valid([1, 3, 5, 1, 5, 5]) == 4
    assert valid([1, 1]) == 2
    assert valid([]) is None


class OwnDecode(PreTrainedTokenizerFast):
    def _decode(self, *args: Any, **settings: Any) -> str:
        return super()._decode(*args, **settings).upper()


def test_ids_are_decoded_as_transformers_does_also_where_a_class_has_a_decode_of_its_own(tiny_path: Path) -> None:
    plain = PreTrainedTokenizerFast.from_pretrained(str(tiny_path))
    own = OwnDecode.from_pretrained(str(tiny_path))
    rng = random.Random(7)
    for inner in (plain, own):
        ours = load_tokenizer(tiny_path)
        tokenizer = Tokenizer(inner, TokenizerFacts(ours.eos_token_ids, {}))
        for skip in (True, False):
            for length in (0, 1, 2, 30):
                ids = [rng.randrange(tokenizer.vocab_size) for _ in range(length)]
                theirs = inner.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(ids, skip) == theirs
    ids = plain.encode("some text")
    assert Tokenizer(own, TokenizerFacts((), {})).decode(ids) == "SOME TEXT"
    assert Tokenizer(plain, TokenizerFacts((), {})).decode(ids) == "some text"


def test_a_folder_that_names_the_generic_class_is_read_as_autotokenizer_reads_it(tiny_path: Path) -> None:
    ours, theirs = load_tokenizer(tiny_path), AutoTokenizer.from_pretrained(str(tiny_path))
    assert type(ours._inner) is type(theirs)
    assert ours.vocabulary() == theirs.get_vocab()
    assert ours.render_chat(CHAT) == theirs.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_a_process_that_only_tokenises_never_imports_torch(smollm2_path: Path, tiny_path: Path, tmp_path: Path) -> None:
    script = (
        "import sys; from deepinfer.stages.model import load_tokenizer, resolve_model\n"
        f"for path in ({str(smollm2_path)!r}, {str(tiny_path)!r}):\n"
        "    load_tokenizer(path).encode_chat([{'role': 'user', 'content': 'x'}])\n"
        "print('torch' in sys.modules)"
    )
    for expected in (None, "False"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={"PATH": "", "HOME": str(tmp_path), "DEEPINFER_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        if expected:
            assert done.stdout.split()[-1] == expected
