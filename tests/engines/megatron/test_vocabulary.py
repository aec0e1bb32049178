"""From which size a vocabulary was padded, by the arguments and the files beside a checkpoint that Megatron wrote."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from tokenizers import AddedToken, Tokenizer, models
from transformers import GPT2Config, PreTrainedTokenizerFast

import ucformat
from tests.sources.suite import DATA
from ucformat.engines.megatron.folder import MegatronArguments
from ucformat.engines.megatron.vocabulary import FilesBeside
from ucformat.errors import AmbiguousLayout
from ucformat.storage.local import LocalStore

if TYPE_CHECKING:
    from pathlib import Path

WORD, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
STORED, ROWS = 32, 19
PADDED = {"make_vocab_size_divisible_by": 16, "tensor_model_parallel_size": 2}


def tokenizer_of(tokens: int, added: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer of so many tokens, some of which were added to the model's own."""
    words = {f"t{i}": i for i in range(tokens - added)}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.add_special_tokens([AddedToken(f"<|{i}|>") for i in range(added)])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def rows(place: Path, args: dict[str, Any] | None = None, stored: int = STORED) -> int:
    beside = FilesBeside(LocalStore(place), "")
    return MegatronArguments.of(args, None, "common.pt", beside).rows(WORD, stored)


def emptied(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("kind", ["sharded", "classic"])
def test_a_vocabulary_that_only_the_tokenizer_tells(kind: str, tmp_path: Path) -> None:
    """Megatron's own arguments have no `vocab_size` then: it pads from that of the tokenizer."""
    folder = tmp_path / "run"
    shutil.copytree(DATA / "megatron" / "tp2-dp2-full" / kind, folder)
    whole = ucformat.open(folder)[WORD].read()
    assert whole.shape[0] == ROWS
    for path in folder.rglob("*.pt"):
        state = torch.load(path, weights_only=False)
        if "args" in state:
            state["args"].vocab_size = None
            state["args"].make_vocab_size_divisible_by = 16
            torch.save(state, path)
    assert ucformat.open(folder)[WORD].shape[0] == STORED
    tokenizer_of(ROWS, added=3).save_pretrained(folder / "iter_0000002" / "tokenizer")
    ck = ucformat.open(folder)
    assert ck[WORD].read().tobytes() == whole.tobytes()
    for name in (WORD, HEAD):
        assert ck[name, "weight.padding"].shape[0] == STORED - ROWS
        assert {ck[name, s].shape[0] for s in ("exp_avg", "exp_avg_sq")} == {ROWS}
    assert "iter_0000002/tokenizer/tokenizer.json" in ck.assets
    GPT2Config(vocab_size=ROWS + 1).save_pretrained(folder / "iter_0000002")
    assert ucformat.open(folder)[WORD].shape[0] == ROWS + 1  # rows that no token needs yet
    GPT2Config(vocab_size=ROWS - 1).save_pretrained(folder / "iter_0000002")
    with pytest.raises(
        AmbiguousLayout, match=r"18 rows by iter_0000002/config\.json, 19 rows by"
    ) as e:
        ucformat.open(folder)
    assert e.value.hint is not None
    assert "vocab_size" in e.value.hint
    assert ucformat.open(folder, options={"vocab_size": 18})[WORD].shape[0] == 18


class TestPublicTraps:
    def test_tokens_that_were_added_count(self, tmp_path: Path) -> None:
        """NVIDIA-NeMo/Speech#14870: an export cut 256 added tokens of Llama 3.1 off."""
        tokenizer_of(32, added=6).save_pretrained(tmp_path)
        assert rows(tmp_path, PADDED) == 32
        tokenizer_of(30, added=6).save_pretrained(tmp_path)
        assert rows(tmp_path, PADDED) == 30
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).unlink()
        (tmp_path / "vocab.json").write_text(json.dumps({f"t{i}": i for i in range(26)}))
        assert rows(tmp_path, PADDED) == 26
        (tmp_path / "added_tokens.json").write_text(json.dumps({"<|a|>": 28}))  # with a gap
        assert rows(tmp_path, PADDED) == 29

    def test_rows_that_no_token_needs_are_not_padding(self, tmp_path: Path) -> None:
        """Qwen has 151,936 rows and 151,665 tokens: only the configuration tells which are padding."""
        tokenizer_of(26).save_pretrained(tmp_path)
        assert rows(tmp_path, PADDED, 64) == 64
        assert rows(tmp_path) == STORED  # nothing tells how Megatron padded
        (tmp_path / "config.json").write_text(json.dumps({"vocab_size": STORED}))
        assert rows(tmp_path, PADDED) == STORED
        (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 28}}))
        assert rows(tmp_path, PADDED) == 28

    def test_the_null_tokenizer_adds_a_token(self, tmp_path: Path) -> None:
        """NVIDIA-NeMo/Megatron-Bridge#5531: 262,143 of its numbers, and one for the end of a document."""
        args = {**PADDED, "vocab_size": 26, "padded_vocab_size": STORED}
        assert rows(tmp_path, args) == 26
        assert rows(tmp_path, {**args, "tokenizer_type": "NullTokenizer"}) == 27
        full = {**args, "vocab_size": 31, "tokenizer_type": "NullTokenizer"}
        assert rows(tmp_path, full) == STORED

    def test_a_size_that_megatron_has_not_padded_from(self, tmp_path: Path) -> None:
        """`--vocab-size` is ignored for most tokenizers; the padding tells that it was."""
        args = {
            **PADDED,
            "vocab_size": 15,
            "padded_vocab_size": 64,
            "tensor_model_parallel_size": 1,
        }
        assert rows(tmp_path, args, 64) == 64

    @pytest.mark.parametrize(
        ("model", "expected"),
        [
            ({"vocab_size": 20, "should_pad_vocab": True}, 20),
            ({"vocab_size": 20, "should_pad_vocab": False}, STORED),
            ({"vocab_size": STORED, "should_pad_vocab": False}, STORED),
            ({"vocab_size": None}, STORED),
        ],
    )
    @pytest.mark.parametrize(
        ("file", "key"), [("run_config.yaml", "model"), ("context/model.yaml", "config")]
    )
    def test_configurations_of_runs(
        self, tmp_path: Path, model: dict[str, Any], expected: int, file: str, key: str
    ) -> None:
        """NVIDIA-NeMo/Megatron-Bridge#625: Megatron Bridge and NeMo 2 store no arguments of Megatron."""
        dtype = {"_target_": "torch.bfloat16", "_call_": False}
        text = yaml.safe_dump({key: {**PADDED, "params_dtype": dtype, **model}})
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
        assert rows(tmp_path) == expected
        if "context" not in file:
            shutil.copytree(
                DATA / "megatron" / "pp2-bf16-tied" / "sharded" / "iter_0000002", tmp_path / "c"
            )
            path = tmp_path / "c" / "common.pt"
            torch.save(
                {k: v for k, v in torch.load(path, weights_only=False).items() if k != "args"}, path
            )
            settings = {"share_embeddings_and_output_weights": True, "num_attention_heads": 4}
            (tmp_path / "c" / file).write_text(yaml.safe_dump({key: settings}))
            ck = ucformat.open(tmp_path / "c")
            assert ck.metadata.aliases == {HEAD: WORD}
            assert ck.manifest.config["num_attention_heads"] == 4

    def test_files_that_cannot_be_read_say_nothing(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        damaged = {
            "run_config.yaml": "model: !!python/object/apply:os.system ['true']",
            "config.json": "[",
            "tokenizer.json": '{"model": {"vocab": {"a": "b"}}}',
            "vocab.json": '{"a": true}',
        }
        for name, text in damaged.items():
            (tmp_path / name).write_text(text)
        assert rows(tmp_path, PADDED) == STORED
        assert [m for m in caplog.messages if "run_config.yaml is no YAML" in m]
        assert [m for m in caplog.messages if "config.json is not used" in m]

    @pytest.mark.parametrize(
        "text",
        [
            "a0: &a0 {k: 1}\n"
            + "".join(f"a{i}: &a{i}\n  <<: [{f'*a{i - 1}, ' * 10}]\n" for i in range(1, 30)),
            "model: !!int ''",
            "model: !!bool perhaps",
            "model: !!timestamp never",
            "[" * 100_000,
            f"a: {'b' * (5 << 20)}",
        ],
        ids=["merges", "int", "bool", "timestamp", "nested", "long"],
    )
    def test_hostile_runs_say_nothing(
        self, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """PyYAML copies what merge keys merge, here 10^29 entries, and has errors of Python's own."""
        (tmp_path / "run_config.yaml").write_text(text)
        assert rows(tmp_path, PADDED) == STORED
        assert [m for m in caplog.messages if "run_config.yaml is n" in m]
